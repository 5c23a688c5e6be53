"""Vectors of 16 floats inside compiled kernels, said outright instead of hoped for.

A compiler may or may not turn a loop into vector instructions, and decides by itself where a multiply and an add are
fused. Where bits are promised and time matters both should be visible in the source: a `Vector` is a value of 16
floats in one AVX-512 or two AVX2 registers, and `fma` always rounds once.

The functions can be called only from compiled code.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, register_model

_intrinsic: Any = intrinsic  # what it makes has no type outside compiled code
LANES = 16
_IR = ir.VectorType(ir.FloatType(), LANES)


def has_wide_registers() -> bool:
    """Whether code is compiled for AVX-512: 32 registers of a whole Vector, where AVX2 has 16 of half a one."""
    features: str = config.CPU_FEATURES or get_host_cpu_features()  # type: ignore[attr-defined]
    return "+avx512f" in features


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector16")


VECTOR = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _IR)


def _address(context, builder, array_type, array, index):
    """Point to element `index` of a flat array; the index is trusted."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _IR.as_pointer())


def _sixteen_times(builder, number):
    undefined = ir.Constant(_IR, ir.Undefined)
    single = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


@_intrinsic
def load(typing_context, array, index):
    """Read 16 consecutive floats of a flat array."""

    def generate(context, builder, signature, arguments):
        vector = builder.load(_address(context, builder, signature.args[0], *arguments))
        vector.align = 4
        return vector

    return VECTOR(array, types.intp), generate


@_intrinsic
def store(typing_context, array, index, vector):
    """Write 16 consecutive floats of a flat array."""

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(arguments[2], address).align = 4
        return context.get_dummy_value()

    return types.none(array, types.intp, VECTOR), generate


@_intrinsic
def splat(typing_context, number):
    """Sixteen times the same float."""

    def generate(context, builder, signature, arguments):
        return _sixteen_times(builder, arguments[0])

    return VECTOR(types.float32), generate


@_intrinsic
def spread(typing_context, array, index):
    """Sixteen times one element of a flat array."""

    def generate(context, builder, signature, arguments):
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0]).data
        return _sixteen_times(builder, builder.load(builder.gep(data, [arguments[1]])))

    return VECTOR(array, types.intp), generate


@_intrinsic
def fma(typing_context, a, b, c):
    """a * b + c, rounded once."""

    def generate(context, builder, signature, arguments):
        function_type = ir.FunctionType(_IR, [_IR] * 3)
        function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{LANES}f32")
        return builder.call(function, arguments)

    return VECTOR(VECTOR, VECTOR, VECTOR), generate


@_intrinsic
def fma_one(typing_context, a, b, c):
    """a * b + c for single floats, rounded once, as in every lane of `fma`."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@_intrinsic
def prefetch(typing_context, array, index):
    """Ask for the element's cache line, into the second-level cache; an address beyond the array does no harm."""

    def generate(context, builder, signature, arguments):
        address = _address(context, builder, signature.args[0], *arguments)
        pointer = builder.bitcast(address, ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [pointer.type, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(ir.IntType(32), value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return types.none(array, types.intp), generate
