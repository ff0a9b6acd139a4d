"""Check that a module computes the same formula for all inputs.

A module that is tested on a few inputs may compute something else on others. That is impossible if
its ``forward`` does not branch and all its ops are analytic (sums, products, powers, moments). To
find out, its ops are recorded, and the functions of torch that it calls. If any function could tell
it a value or a size, it is run once more on a tensor without values, whose number of rows is a
symbol.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ANALYTIC = {
    "_reshape_alias", "_to_copy", "_unsafe_view", "add", "alias", "clone", "detach", "div",
    "expand", "mean", "movedim", "mul", "native_group_norm", "native_layer_norm", "neg", "permute",
    "pow", "reciprocal", "reshape", "rsqrt", "rsub", "sqrt", "square", "squeeze", "std", "std_mean",
    "sub", "sum", "t", "transpose", "unsqueeze", "var", "var_mean", "view",
}  # fmt: skip
"""``aten`` ops that use one formula for all values, move values, or change the dtype."""
FUNCTIONS = {
    getattr(home, name)
    for home in (torch, torch.Tensor, torch._C.TensorBase, nn.functional)
    for name in ANALYTIC | {"__rdiv__", "__rsub__", "double", "float", "group_norm", "layer_norm",
                            "to", "type", "type_as"}
    if hasattr(home, name)
} | {cast(Any, torch.Tensor.dtype).__get__}  # fmt: skip
"""Functions of torch for these ops. None of them returns a value or a size to Python. They may
return a dtype, since other dtypes are tested separately."""
VALUE = "its forward reads values of its input in Python, as `if` and `.item()` do"


def decision(module: nn.Module, size: tuple[int, ...], fixed: set[int]) -> str | None:
    """Why ``module`` may compute another formula for some inputs with ``len(size)`` dimensions.

    ``None`` if it cannot. Parameters are float64. Dimensions in ``fixed`` have the given size, all
    others may have any size.
    """
    ops, functions, ones = Operations(), _Functions(), torch.ones(size, dtype=torch.float64)
    with torch.no_grad(), ops, functions, Float64():
        module(ones)
    if functions.called <= FUNCTIONS:
        return ops.objection
    sizes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    fake = FakeTensorMode(shape_env=sizes)
    copied = copy.deepcopy(module)
    tables: tuple[dict[str, Any], ...] = (copied._parameters, copied._buffers)
    for held in tables:
        for name, tensor in held.items():
            if tensor is not None:
                held[name] = fake.from_tensor(tensor.detach(), static_shapes=True)
    dynamic = [DimDynamic.STATIC if i in fixed else DimDynamic.DYNAMIC for i in range(len(size))]
    x = fake.from_tensor(
        torch.empty(size, dtype=torch.float64),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
    )
    ops, choices = Operations(), _Choices(sizes)
    try:
        with torch.no_grad(), fake, ops, choices, Float64():
            copied(x)
        choices.look()
    except (DataDependentOutputException, GuardOnDataDependentSymNode):
        return VALUE
    except Exception as error:  # custom modules may raise any exception, and so may torch
        return f"its forward cannot be analysed ({type(error).__name__})"
    if choices.taken:
        return "its forward branches on the number of rows of its input"
    return ops.objection


class Operations(TorchDispatchMode):
    """Finds the first op inside the block that is not analytic."""

    def __init__(self) -> None:
        super().__init__()
        self.other: str | None = None

    @property
    def objection(self) -> str | None:
        """A message about the first op that is not analytic; ``None`` if there is none."""
        if self.other in (None, "_local_scalar_dense"):
            return self.other and VALUE
        return f"its forward computes {self.other}, which is not part of a LayerNorm"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        rounds = not (kwargs or {}).get("dtype", torch.float64).is_floating_point
        if func.namespace == "aten" and (rounds or name.removesuffix("_") not in ANALYTIC):
            self.other = self.other or name
        elif func.namespace not in ("aten", "prim"):
            self.other = self.other or f"{func.namespace}.{name}"
        return func(*args, **(kwargs or {}))


class Float64(TorchFunctionMode):
    """Replaces float32 by float64 in explicit conversions (in softmax, rotary angles, norms).

    A tensor that is made without a dtype is float64 as well: XGLM makes the lowest number of the
    dtype that it computes in.
    """

    def __enter__(self) -> Self:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        torch.set_default_dtype(self._before)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **wide)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _Functions(TorchFunctionMode):
    """Records all functions of torch that are called, even to read a size or a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[Callable[..., Any]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.called.add(func)
        return func(*args, **(kwargs or {}))


class _Choices(TorchFunctionMode):
    """Records whether the module itself, and not a function of torch, reads a symbolic size."""

    def __init__(self, sizes: ShapeEnv) -> None:
        super().__init__()
        self.sizes = sizes
        self.taken = False
        self.known = len(sizes.guards)

    def look(self) -> None:
        """Check for new guards on sizes: the module made them since the last call of torch."""
        self.taken = self.taken or len(self.sizes.guards) > self.known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.look()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.known = len(self.sizes.guards)
