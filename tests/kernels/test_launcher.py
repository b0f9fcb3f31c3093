"""The launcher over a fake CUDA runtime: what it asks, selects, encodes, keeps and launches."""

from __future__ import annotations

import ctypes
import random
import re
import threading

import pytest
import torch

from tests.kernels import fake_cuda
from videoattn.dispatch import AttentionCall, KernelUnavailable, choose
from videoattn.kernels import abi, native

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fake():
    return fake_cuda.FakeCuda()


@pytest.fixture(autouse=True)
def configured(fake):
    fake.configure()


def tensors(q_len=64, kv_len=96, batch=1, heads=2, head_dim=64):
    shapes = [(batch, n, heads, head_dim) for n in (q_len, kv_len, kv_len, q_len)]
    return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


def attention(fake, call):
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    return fake.library.videoattn_attention(ctypes.byref(call), text, abi.MESSAGE_BYTES), text.value.decode()


def test_a_launch_is_the_plan(fake):
    q, k, v, out = tensors()
    call = native.fill_call(q, k, v, out, scale=0.125, arch=90, num_sms=132, stream=0x1234560)
    assert attention(fake, call) == (abi.OK, "")
    (launch,) = fake.launches()
    made = abi.Plan(struct_bytes=ctypes.sizeof(abi.Plan))
    assert fake.library.videoattn_plan(ctypes.byref(call), ctypes.byref(made), None, 0) == abi.OK
    assert launch.kernel == made.kernel
    assert list(launch.grid) == list(made.grid)
    assert list(launch.block) == list(made.block)
    assert launch.dynamic_smem == made.dynamic_smem
    assert (launch.device, launch.stream, launch.address) == (0, 0x1234560, q.data_ptr())
    blob = made.params[4]
    assert bytes(launch.args) == bytes(made.args[blob.offset : blob.offset + 32])


def test_every_device_is_asked_and_prepared_once(fake):
    """Attributes per device, function attributes per kernel and device, maps per call: none twice."""
    q, k, v, out = tensors(q_len=80)
    for _ in range(3):
        for device in (0, 1):
            call = native.fill_call(q, k, v, out, scale=0.125, device=device)
            # Two calls at arbitrary addresses share a place in the cache once in 32 times.
            for place, tensor in enumerate((call.q, call.k, call.v, call.out)):
                tensor.data = 0x7F0000000000 + 0x100000 * place
            assert attention(fake, call) == (abi.OK, "")
    counts = fake.counts()
    assert counts[fake_cuda.ATTRIBUTES] <= 6
    assert counts[fake_cuda.FUNCTIONS] <= 2
    assert counts[fake_cuda.MAPS] == 8
    fake.configure()
    call = native.fill_call(q, k, v, out, scale=0.5)
    assert attention(fake, call) == (abi.OK, "")
    assert fake.counts()[: fake_cuda.MAPS + 1] == [0, 0, 4]


def test_the_caller_keeps_its_device(fake):
    q, k, v, out = tensors()
    for device, arch in ((0, 90), (1, 100)):
        call = native.fill_call(q, k, v, out, scale=0.125, device=device, arch=arch, num_sms=132)
        assert attention(fake, call) == (abi.OK, "")
        assert fake.library.fake_current_device() == 0
    assert [launch.device for launch in fake.launches()] == [0, 1]
    missing = native.fill_call(q, k, v, out, scale=0.125, device=2, arch=90, num_sms=132)
    status, message = attention(fake, missing)
    assert status == abi.CUDA_ERROR
    assert message == "selecting the device: invalid device ordinal"
    assert fake.library.fake_current_device() == 0


def test_the_device_chooses_the_family(fake):
    """Without an arch the device is asked: device 0 of the fake is an H200, device 1 a B200."""
    q, k, v, out = tensors(q_len=70)
    for device in (0, 1):
        assert attention(fake, native.fill_call(q, k, v, out, scale=0.125, device=device)) == (abi.OK, "")
    names = [launch.kernel.decode() for launch in fake.launches()]
    assert [name.split("_")[1] for name in names] == ["hopper", "blackwell"]


def test_launch_errors_are_told_and_launch_again(fake):
    q, k, v, out = tensors(q_len=90)
    call = native.fill_call(q, k, v, out, scale=0.125, arch=90, num_sms=132)
    fake.configure(launch_error=700)
    status, message = attention(fake, call)
    assert status == abi.CUDA_ERROR
    assert message.startswith("videoattn_hopper_d64_")
    fake.configure()
    assert attention(fake, call) == (abi.OK, "")


@pytest.mark.parametrize(("arch", "alignment"), [(90, 16), (100, 32), (103, 32)])
def test_a_workspace_starts_where_its_stores_may(fake, arch, alignment):
    q, k, v, out = tensors(kv_len=600)
    storage = torch.empty(2 * 2 * 64 * 65 + 32)
    start = -storage.data_ptr() % 64 // 4
    for offset in range(0, 64, 8):
        workspace = storage[start + offset // 4 :]
        call = native.fill_call(
            q, k, v, out, scale=0.125, arch=arch, num_sms=132, splits=2, workspace=workspace
        )
        fake.configure()
        refused = f"workspace does not start at a multiple of {16 if offset % 16 else alignment} bytes"
        wanted = (abi.UNSUPPORTED, refused) if offset % alignment else (abi.OK, "")
        assert attention(fake, call) == wanted
        assert len(fake.launches()) == (0 if offset % alignment else 2)


@pytest.mark.parametrize(
    ("lacking", "dtype"),
    [("videoattn_blackwell_d128_fp16", torch.float16), ("videoattn_merge_d128_bf16", torch.bfloat16)],
)
def test_without_an_image_of_each_kernel_nothing_is_launched(fake, lacking, dtype):
    """A split call takes two launches; neither is made where one could not be."""
    q, k, v, out = (x.to(dtype) for x in tensors(kv_len=600, head_dim=128))
    workspace = torch.empty(2 * 2 * 64 * 129)
    call = native.fill_call(q, k, v, out, scale=0.125, device=1, splits=2, workspace=workspace)
    fake.lack(lacking)
    status, message = attention(fake, call)
    assert status == abi.CUDA_ERROR
    assert message.startswith(f"{lacking}: ")
    assert fake.launches() == []
    fake.lack("")
    assert attention(fake, call) == (abi.OK, "")
    assert len(fake.launches()) == 2


@pytest.mark.parametrize(("driver", "said"), [(12090, "12.9"), (11080, "11.8")])
def test_the_driver_floor_is_named(fake, driver, said):
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    check = fake.library.videoattn_check_device
    assert check(0, text, abi.MESSAGE_BYTES) == abi.OK
    fake.configure(driver=driver)
    assert check(0, text, abi.MESSAGE_BYTES) == abi.UNSUPPORTED
    message = text.value.decode()
    assert f"the driver serves CUDA {said}" in message
    assert "driver 580 or newer" in message
    assert f"build with nvcc {driver // 1000}" in message


@pytest.mark.parametrize(
    ("driver", "capability", "reason"),
    [
        (12090, (9, 0), "the driver serves CUDA 12.9, this build needs CUDA 13 (driver 580 or newer)"),
        (0, (9, 0), "no NVIDIA driver answers on this machine"),
        (13000, (8, 6), "it has no code for compute capability 8.6"),
    ],
)
def test_the_receipt_says_what_a_gpu_lacks(fake, monkeypatch, driver, capability, reason):
    """An old driver, none, another GPU: `auto` binds SDPA and the kernel's own words are the reason."""
    monkeypatch.setattr(native.library, "load", lambda: fake.library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fake.configure(driver=driver)
    call = AttentionCall(1, 2, 64, 64, 64, torch.bfloat16, "cuda", capability)
    choose.cache_clear()
    choice = choose(call)
    assert choice.kernel == "sdpa"
    assert choice.reasons["hopper"].startswith(reason)
    with pytest.raises(KernelUnavailable, match=re.escape(reason)):
        choose(call, "hopper")
    choose.cache_clear()


def test_no_driver_is_named(fake):
    fake.configure(driver=0)
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    assert fake.library.videoattn_check_device(0, text, abi.MESSAGE_BYTES) == abi.CUDA_ERROR
    assert text.value == b"no NVIDIA driver answers on this machine"


def test_only_devices_with_kernels_are_approved(fake):
    fake.configure(devices=3)
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    check = fake.library.videoattn_check_device
    statuses = [check(device, text, abi.MESSAGE_BYTES) for device in range(3)]
    assert statuses == [abi.OK, abi.OK, abi.UNSUPPORTED]
    assert text.value == b"no kernel for compute capability 8.6"
    assert fake.counts()[fake_cuda.SWITCHES] == 0


def test_threads_do_not_mix_their_calls(fake):
    """Each thread launches more shapes than the cache of calls holds; every launch has its own tensors,
    stream, device and arguments."""
    per_thread, rounds = 40, 300
    wanted: dict[tuple[int, ...], int] = {}
    calls: list[list[abi.Call]] = []
    keep = []
    for thread in range(4):
        calls.append([])
        for index in range(per_thread):
            q, k, v, out = tensors(q_len=8 * index + 8, kv_len=16 * index + 16)
            lengths = torch.tensor([index], dtype=torch.int32)
            keep += [q, k, v, out, lengths]
            device, stream = thread % 2, 0x10000 * (thread + 1)
            call = native.fill_call(
                q, k, v, out, scale=0.125, kv_lengths=lengths, device=device, stream=stream
            )
            calls[thread].append(call)
            wanted[device, stream, q.data_ptr(), lengths.data_ptr()] = 0
    statuses = []

    def work(thread):
        order = random.Random(thread)
        for _ in range(rounds):
            statuses.append(attention(fake, order.choice(calls[thread])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {(abi.OK, "")}
    launches = fake.launches()
    assert len(launches) == 4 * rounds
    for launch in launches:
        wanted[launch.device, launch.stream, launch.address, launch.args[1]] += 1
    assert sum(count > 0 for count in wanted.values()) > len(wanted) // 2


def test_run_packs_what_the_tensors_say(fake, monkeypatch):
    """`native.run` as a whole: output layout, copies for TMA, lengths, LSE, scale, stream, split keys."""
    monkeypatch.setattr(native, "_entry", fake.library.fake_attention)
    monkeypatch.setattr(native, "num_sms", lambda device: 132)
    monkeypatch.setattr(native.library, "load", lambda: fake.library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x77, raising=False)
    native.workspace_bytes.cache_clear()
    fused = torch.randn(2, 64, 3, 4, 64).bfloat16()
    q, k, v = fused.unbind(2)
    lengths = torch.tensor([3, 64], dtype=torch.int32)
    options = {"scale": 0.5, "kv_lengths": lengths, "return_lse": True, "arch": 90}
    out, lse = native.run(q, k, v, **options)
    assert out.is_contiguous()
    assert out.shape == q.shape
    assert lse is not None
    assert lse.shape == (2, 4, 64)
    (launch,) = fake.launches()
    assert (launch.address, launch.stream) == (q.data_ptr(), 0x77)
    assert launch.args[0] == lse.data_ptr()
    assert launch.args[1] == lengths.data_ptr()

    fake.configure()
    repeated = q[:, :, :1].expand(-1, -1, 4, -1)
    out, _ = native.run(repeated, k, v, **options)
    assert out.is_contiguous()
    assert fake.launches()[0].address not in (0, q.data_ptr())

    fake.configure()
    short = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    long = torch.zeros(1, 20_000, 2, 64, dtype=torch.bfloat16)
    native.run(short, long, long, scale=0.5, kv_lengths=None, return_lse=False, arch=90)
    attention_launch, merge = fake.launches()
    assert attention_launch.grid[0] > 2
    assert attention_launch.kernel.startswith(b"videoattn_hopper_d64")
    assert merge.kernel == b"videoattn_merge_d64_bf16"
    native.workspace_bytes.cache_clear()


def test_run_copies_logits_whose_heads_lie_apart(on_the_fake, monkeypatch):
    q, k, v, _ = tensors()
    seen = []
    monkeypatch.setattr(native, "launch", lambda call: seen.append(abi.Call.from_buffer_copy(call)))
    logits = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.bfloat16).transpose(1, 2)
    native.run(q, k, v, scale=0.5, kv_lengths=None, return_lse=False, arch=90, gate=logits)
    (call,) = seen
    assert call.gate.data not in (None, logits.data_ptr())
    assert (call.gate.stride_batch, call.gate.stride_seq) == (q.shape[1] * q.shape[2], q.shape[2])


@pytest.fixture
def on_the_fake(fake, monkeypatch):
    monkeypatch.setattr(native, "_entry", fake.library.fake_attention)
    monkeypatch.setattr(native, "num_sms", lambda device: 132)
    monkeypatch.setattr(native.library, "load", lambda: fake.library)
    streams = iter(range(0x100, 0x200))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: next(streams), raising=False)
    native.workspace_bytes.cache_clear()
    yield fake
    native.workspace_bytes.cache_clear()


@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "fused", "head first", "split keys"])
def test_a_call_made_ready_launches_what_a_run_does(
    on_the_fake, monkeypatch, layout, return_lse, with_lengths, with_gate
):
    """Byte for byte but for the addresses of results, the stream being that of the moment."""

    def draw():
        if layout == "split keys":
            q, k, v = (torch.zeros(1, n, 2, 64).bfloat16() for n in (64, 20_000, 20_000))
        elif layout == "fused":
            q, k, v = torch.randn(2, 64, 3, 4, 64).bfloat16().unbind(2)
        elif layout == "head first":
            q, k, v = (torch.randn(2, 4, 64, 64).bfloat16().transpose(1, 2) for _ in range(3))
        else:
            q, k, v, _ = (torch.randn_like(t) for t in tensors(batch=2))
        lengths = torch.arange(1, q.shape[0] + 1, dtype=torch.int32)
        # More heads than there are, as of a fused projection.
        gate = torch.randn(*q.shape[:2], q.shape[2] + 3).bfloat16()[..., 1 : 1 + q.shape[2]]
        return q, k, v, lengths if with_lengths else None, gate if with_gate else None

    seen = []
    launch = native.launch
    monkeypatch.setattr(native, "launch", lambda call: (seen.append(call), launch(call)))
    q, k, v, lengths, gate = draw()
    options = {"scale": 0.5, "return_lse": return_lse, "arch": 90}
    ready = native.prepare(q, k, v, kv_lengths=lengths, gate=gate, **options)
    assert ready is not None
    assert seen == []
    for _ in range(3):
        q, k, v, lengths, gate = draw()
        results = native.run(q, k, v, kv_lengths=lengths, gate=gate, **options)
        again = ready(q, k, v, lengths) if gate is None else ready(q, k, v, lengths, gate)
        assert again is not None
        for ours, theirs in zip(again, results, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert (ours.shape, ours.dtype, ours.stride()) == (
                    theirs.shape,
                    theirs.dtype,
                    theirs.stride(),
                )
        calls = [abi.Call.from_buffer_copy(call) for call in seen[-2:]]
        assert [call.out.data for call in calls] == [results[0].data_ptr(), again[0].data_ptr()]
        assert [call.lse for call in calls] == [
            None if result[1] is None else result[1].data_ptr() for result in (results, again)
        ]
        assert calls[0].stream + 1 == calls[1].stream
        if gate is not None:
            held = calls[0].gate.data, calls[0].gate.stride_batch, calls[0].gate.stride_seq
            assert held == (gate.data_ptr(), *gate.stride()[:2])
        assert (calls[0].workspace is None) == (calls[1].workspace is None) == (layout != "split keys")
        for call in calls:
            call.out.data = call.lse = call.stream = call.workspace = None
        assert bytes(calls[0]) == bytes(calls[1])
    assert len(on_the_fake.launches()) == 2 * 3 * (2 if layout == "split keys" else 1)


def test_what_tma_cannot_take_is_not_made_ready(on_the_fake):
    q, k, v, _ = tensors()
    options = {"scale": 0.5, "kv_lengths": None, "return_lse": False, "arch": 90}
    ready = native.prepare(q, k, v, **options)
    assert ready is not None
    storage = torch.zeros(q.numel() + 8, dtype=torch.bfloat16)
    for offset in range(9):
        shifted = storage[offset : offset + q.numel()].view(q.shape)
        taken = shifted.data_ptr() % 16 == 0
        assert (ready(shifted, k, v, None) is not None) == taken
        assert (native.prepare(shifted, k, v, **options) is not None) == taken
    repeated = q[:, :, :1].expand(-1, -1, 2, -1)
    assert native.prepare(repeated, k, v, **options) is None
    lengths = torch.ones(2, 2, dtype=torch.int32)[:, 0]
    assert native.prepare(q, k, v, **{**options, "kv_lengths": lengths}) is None
    apart = torch.zeros(*q.shape[:2], q.shape[2] * 2, dtype=torch.bfloat16)[..., ::2]
    assert native.prepare(q, k, v, gate=apart, **options) is None
    assert native.prepare(q, k, v, gate=apart.contiguous(), **options) is not None


def test_a_ready_call_says_why_it_was_refused(on_the_fake):
    q, k, v, _ = tensors(q_len=72)
    ready = native.prepare(q, k, v, scale=0.5, kv_lengths=None, return_lse=False, arch=90)
    assert ready is not None
    on_the_fake.configure(launch_error=700)
    with pytest.raises(RuntimeError, match="videoattn kernel: videoattn_hopper_d64_"):
        ready(q, k, v, None)
    on_the_fake.configure()
    assert ready(q, k, v, None) is not None
