"""The library's C structs for ctypes, declared as in `csrc/api.h`."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_char, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p

VERSION = 2  # VIDEOATTN_API_VERSION
OK, UNSUPPORTED, CUDA_ERROR = 0, 1, 2
BF16, FP16 = 0, 1
MESSAGE_BYTES = 512


class Tensor(ctypes.Structure):
    """A BSHD tensor with a contiguous last dimension; strides in elements."""

    _fields_ = (
        ("data", c_void_p),
        ("stride_batch", c_int64),
        ("stride_seq", c_int64),
        ("stride_head", c_int64),
    )


class Gate(ctypes.Structure):
    """Logits `(batch, q_len, heads)`, heads side by side; strides in elements."""

    _fields_ = (("data", c_void_p), ("stride_batch", c_int64), ("stride_seq", c_int64))


class Call(ctypes.Structure):
    """Everything a launch needs (`VideoattnCall`)."""

    _fields_ = (
        ("struct_bytes", c_uint32),
        ("arch", c_int32),
        ("device", c_int32),
        ("dtype", c_int32),
        ("batch", c_int64),
        ("heads", c_int64),
        ("q_len", c_int64),
        ("kv_len", c_int64),
        ("head_dim", c_int64),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("kv_lengths", c_void_p),
        ("scale", c_float),
        ("grid", c_int32),
        ("num_sms", c_int32),
        ("splits", c_int32),
        ("rows", c_int32),
        ("reserved", c_int32),
        ("stream", c_void_p),
        ("workspace", c_void_p),
        ("gate", Gate),
    )


# The same bytes as Call, its fields in order.
PACKED_CALL = struct.Struct("=Iiii5q" + "Qqqq" * 4 + "QQfiiiiiQQ" + "Qqq")


class TensorMap(ctypes.Structure):
    """Arguments of `cuTensorMapEncodeTiled`; enum fields carry the driver's values."""

    _fields_ = (
        ("address", c_uint64),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("dims", c_uint64 * 5),
        ("byte_strides", c_uint64 * 4),
        ("box", c_uint32 * 5),
        ("swizzle", c_int32),
        ("l2_promotion", c_int32),
        ("oob_fill", c_int32),
    )


class Param(ctypes.Structure):
    """A kernel parameter: a tensor map's index, or -1 and a range of `Plan.args`."""

    _fields_ = (("tensor_map", c_int32), ("offset", c_uint32), ("bytes", c_uint32))


class Plan(ctypes.Structure):
    """What the launcher and the simulator run (`VideoattnPlan`)."""

    _fields_ = (
        ("struct_bytes", c_uint32),
        ("kernel", c_char * 92),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("dynamic_smem", c_uint32),
        ("num_maps", c_int32),
        ("num_params", c_int32),
        ("args_bytes", c_uint32),
        ("maps", TensorMap * 6),
        ("params", Param * 8),
        ("args", c_uint8 * 256),
    )


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the functions that `library` has their argument and result types; returns it."""
    message = (ctypes.c_char_p, ctypes.c_size_t)
    signatures = {
        "videoattn_plan": ((ctypes.POINTER(Call), ctypes.POINTER(Plan), *message), ctypes.c_int),
        "videoattn_plan_merge": ((ctypes.POINTER(Call), ctypes.POINTER(Plan), *message), ctypes.c_int),
        "videoattn_workspace_bytes": ((ctypes.POINTER(Call),), ctypes.c_uint64),
        # A Call by reference, or PACKED_CALL's bytes.
        "videoattn_attention": ((ctypes.c_void_p, *message), ctypes.c_int),
        "videoattn_check_device": ((ctypes.c_int, *message), ctypes.c_int),
        "videoattn_build_info": ((), ctypes.c_char_p),
    }
    for name, (arguments, result) in signatures.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    return library
