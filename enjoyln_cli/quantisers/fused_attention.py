"""Attention without a mask as one operator, which onnxruntime computes in tiles.

    softmax(s q k^T) v    for each head of q, k and v, of shape (batch, length, heads * features)

The operator is ``MultiHeadAttention`` of ``com.microsoft``, which onnxruntime has everywhere, in
JavaScript too. Then an encoder of speech or images never holds its scores as a whole. Whisper's
have 1500 x 1500 elements for each head; its encoder takes about half the time.
"""

from __future__ import annotations

from typing import Any

DOMAIN, ATTENTION = "com.microsoft", "MultiHeadAttention"
BY_HEAD, TRANSPOSED = (0, 2, 1, 3), (0, 2, 3, 1)
"""How queries and values, and how keys are permuted for the products of each head."""
FLOAT = 1
"""``onnx.TensorProto.FLOAT``."""


def fuse_attention(program: Any) -> int:
    """Fuse each attention without a mask of an ``onnx_ir.Model``, in place; returns how many."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    fused = sum(_fuse(node) for node in list(program.graph.all_nodes()))
    if fused:
        program.graph.opset_imports[DOMAIN] = 1
        RemoveUnusedNodesPass()(program)
    return fused


def _fuse(softmax: Any) -> bool:
    """Fuse the attention around a softmax; returns whether there is an attention to fuse."""
    import onnx_ir

    if softmax.op_type != "Softmax" or _attribute(softmax, "axis", -1) not in (-1, 3):
        return False
    scores = _made_by("MatMul", softmax.inputs[0])
    mixed = _reader("MatMul", softmax.outputs[0])
    back = mixed and _reader("Transpose", mixed.outputs[0])
    joined = back and _reader("Reshape", back.outputs[0])
    if not (scores and joined) or _attribute(back, "perm") != BY_HEAD:
        return False
    query, key = scores.inputs
    read = [(query, BY_HEAD), (key, TRANSPOSED), (mixed.inputs[1], BY_HEAD)]
    found = [part for each in read if (part := _split_by_head(*each))]
    heads = {part[1] for part in found}
    result = joined.outputs[0]
    if len(found) != len(read) or len(heads) != 1 or mixed.inputs[0] is not softmax.outputs[0]:
        return False
    if _sizes(result)[:2] != _sizes(found[0][0])[:2] or len(_sizes(result)) != 3:
        return False
    node = onnx_ir.node(
        ATTENTION,
        [part[0] for part in found],
        {"num_heads": heads.pop(), "scale": 1.0},
        domain=DOMAIN,
        name=f"{joined.name}.fused",
    )
    node.metadata_props.update(joined.metadata_props)
    (made,) = node.outputs
    made.shape, made.type = result.shape, result.type
    joined.graph.insert_before(joined, node)
    name, result.name = result.name, f"{result.name}.joined"
    result.replace_all_uses_with(made, replace_graph_outputs=True)
    made.name = name
    return True


def _split_by_head(value: Any, order: tuple[int, ...]) -> tuple[Any, int] | None:
    """The value of shape ``(batch, length, heads * features)`` that ``value`` has by head.

    With the number of heads; ``None`` if ``value`` is anything else.
    """
    moved = _made_by("Transpose", value)
    view = moved and _made_by("Reshape", moved.inputs[0])
    if not view or _attribute(moved, "perm") != order or value.dtype != FLOAT:
        return None
    whole, split = _sizes(view.inputs[0]), _sizes(view.outputs[0])
    if len(whole) != 3 or len(split) != 4 or whole[:2] != split[:2]:
        return None
    _, _, heads, features = split
    if not all(isinstance(size, int) for size in (heads, features, whole[2])):
        return None
    return (view.inputs[0], heads) if heads * features == whole[2] else None


def _made_by(kind: str, value: Any) -> Any:
    """The node of this type that computes a value, or ``None``."""
    node = value.producer()
    return node if node is not None and node.op_type == kind else None


def _reader(kind: str, value: Any) -> Any:
    """The node of this type that is the only reader of a value, or ``None``."""
    uses = value.uses()
    node = uses[0][0] if len(uses) == 1 and not value.is_graph_output() else None
    return node if node is not None and node.op_type == kind else None


def _attribute(node: Any, name: str, default: Any = None) -> Any:
    found = node.attributes.get(name)
    value = default if found is None else found.value
    return tuple(value) if isinstance(value, list | tuple) else value


def _sizes(value: Any) -> tuple[Any, ...]:
    """The sizes of a value: numbers, and names of dynamic sizes."""
    shape = value.shape or ()
    return tuple(size if isinstance(size, int) else size.value for size in shape)
