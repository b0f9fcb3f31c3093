"""The projections of an attention that read the same tensor, in one matrix product.

Their weights have to lie side by side in memory, which `lay_side_by_side` sees to: the product then reads
them as the one matrix that they are. What decides is where weights lie, so those that something changes in
their place (a LoRA merged into them, `load_state_dict`) stay in one product, and those that something moves
have one each again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from videoattn.processors.untouched import linear_is_patched, plain_linear, untouched

# Rows up to which self-attention's four are one product. With more, two are faster: four leave matrices of
# a width that the product's tiles do not divide, and the gates' place in them costs as much as it spares.
ROWS_OF_ONE = 4096
# Bytes; TMA takes rows that start at their multiples.
ALIGNMENT = 16
# On an attention, the storages that `lay_side_by_side` made for it.
_WHOLES = "_videoattn_wholes"


class Projected(NamedTuple):
    """`(batch, seq, heads · head_dim)` each, and `(batch, seq, heads)` logits where the layer has gates."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor | None


def project(
    attn: Any,
    hidden_states: torch.Tensor,
    source: torch.Tensor,
    *,
    together: bool,
    rows_of_one: int = ROWS_OF_ONE,
) -> Projected:
    """All projections of one attention of `(batch, seq, channels)` tensors.

    `together`: whether those whose weights lie side by side may be one product. Results are then views of its
    output, rows apart. `rows_of_one`: rows up to which self-attention's four are one.
    """
    gates = getattr(attn, "to_gate_logits", None)
    first, second = [attn.to_q] if gates is None else [gates, attn.to_q], [attn.to_k, attn.to_v]
    if not together or torch.compiler.is_compiling():
        *gate, query = [layer(hidden_states) for layer in first]
        key, value = [layer(source) for layer in second]
    elif (
        source is hidden_states
        and hidden_states.shape[:-1].numel() <= rows_of_one
        and (parts := _product([*first, *second], hidden_states)) is not None
    ):
        *gate, query, key, value = parts
    else:
        *gate, query = _products(first, hidden_states)
        key, value = _products(second, source)
    return Projected(query, key, value, gate[0] if gate else None)


def _products(layers: Sequence[Any], x: torch.Tensor) -> Sequence[torch.Tensor]:
    parts = _product(layers, x)
    return [layer(x) for layer in layers] if parts is None else parts


def _product(layers: Sequence[Any], x: torch.Tensor) -> Sequence[torch.Tensor] | None:
    """What the layers give, by one product; None where that would not be what calling them does."""
    if len(layers) == 1 or type(x) is not torch.Tensor or linear_is_patched():
        return None
    if any(type(layer) is not torch.nn.Linear for layer in layers):
        return None
    # Not by attribute, which costs as much as the rest of what is asked of a layer here.
    parameters = [layer._parameters for layer in layers]
    weights, biases = ([each.get(name) for each in parameters] for name in ("weight", "bias"))
    if weights[0] is None or not (_side_by_side(weights) and _side_by_side(biases)):
        return None
    if not all(map(untouched, layers)):
        return None
    # Autocast keeps what it casts of a parameter, not of a view of some.
    if weights[0].dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
        return None
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in weights + biases):
        return None
    widths = [layer.out_features for layer in layers]
    rows, columns = sum(widths), weights[0].shape[1]
    bias = None if biases[0] is None else biases[0].as_strided((rows,), (1,))
    return F.linear(x, weights[0].as_strided((rows, columns), (columns, 1)), bias).split(widths, -1)


def _side_by_side(parts: Sequence[Any]) -> bool:
    """Whether weights or biases follow one another in one storage; biases that are all absent do."""
    first = parts[0]
    if first is None:
        return all(part is None for part in parts)
    offset, address, size = first.storage_offset(), first.data_ptr(), first.element_size()
    for part in parts:
        # Neighbours in memory that the allocator happened to place there differ in their offsets.
        if (
            type(part) is not torch.nn.Parameter
            or part.storage_offset() != offset
            or part.data_ptr() != address
            or part.dtype is not first.dtype
            or part.shape[1:] != first.shape[1:]
            or not part.is_contiguous()
        ):
            return False
        count = part.numel()
        offset += count
        address += count * size
    return True


def lay_side_by_side(attn: Any) -> bool:
    """Move the weights of an attention's projections so that `project` can take several at once.

    The parameters stay the same objects with the same values, and become views of one tensor for each input.
    Returns whether they lie so now. Left as they are: adapters, hooks, quantised weights, mixed dtypes, and
    weights that share their storage with something else, which moving them would not free.
    """
    groups = _groups(attn)
    wholes: set[tuple[int, int]] = vars(attn).get(_WHOLES, set())
    for group in groups:
        for name in ("weight", "bias"):
            parts = [getattr(layer, name) for layer in group]
            if _side_by_side(parts):
                continue
            if len(set(map(id, parts))) < len(parts) or not all(_alone(part, wholes) for part in parts):
                return False
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.cat([part.detach() for part in parts])
                for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                    part.data = place
            wholes = {*wholes, _place(whole)}
            setattr(attn, _WHOLES, wholes)
    return bool(groups)


def take_apart(attn: Any) -> bool:
    """Give weights that `lay_side_by_side` moved a storage each again; returns whether there were any."""
    wholes: set[tuple[int, int]] = vars(attn).get(_WHOLES, set())
    layers = [getattr(attn, name, None) for name in ("to_gate_logits", "to_q", "to_k", "to_v")]
    parts = [part for layer in layers if layer is not None for part in layer.parameters()]
    ours = [part for part in parts if type(part) is torch.nn.Parameter and _place(part) in wholes]
    with torch.inference_mode(False), torch.no_grad():
        for part in ours:
            part.data = part.data.clone()
    vars(attn).pop(_WHOLES, None)
    return bool(ours)


def _alone(part: torch.Tensor, wholes: set[tuple[int, int]]) -> bool:
    """Whether nothing else keeps a weight's storage, but others of its attention."""
    return part.untyped_storage().nbytes() == part.nbytes or _place(part) in wholes


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def are_side_by_side(attn: Any) -> bool:
    """Whether `project` can take that attention's projections together as they are."""
    groups = _groups(attn)
    return bool(groups) and all(
        _side_by_side([getattr(layer, name) for layer in group])
        for group in groups
        for name in ("weight", "bias")
    )


def _groups(attn: Any) -> list[list[Any]]:
    """The layers of an attention that belong side by side, by input; none where one of them is not plain."""
    gates = getattr(attn, "to_gate_logits", None)
    layers = [each for each in (gates, attn.to_q, attn.to_k, attn.to_v) if each is not None]
    first = getattr(layers[0], "weight", None)
    if not isinstance(first, torch.Tensor) or not all(plain_linear(layer, first) for layer in layers):
        return []
    parts = [part for layer in layers for part in (layer.weight, layer.bias) if part is not None]
    if any(part.is_inference() or part.device != first.device or part.dtype != first.dtype for part in parts):
        return []
    hidden, source = layers[:-2], layers[-2:]
    if gates is not None:
        # All that follows the logits in a row of the product's output has to start at a multiple, too.
        aligned = gates.out_features * first.element_size() % ALIGNMENT == 0
        if not aligned or (gates.bias is None) != (attn.to_q.bias is None):
            hidden = []
    groups = [layers] if hidden and attn.to_q.in_features == attn.to_k.in_features else [hidden, source]
    alike = all(len({layer.bias is None for layer in group}) == 1 for group in groups if group)
    return [group for group in groups if len(group) > 1] if alike else []
