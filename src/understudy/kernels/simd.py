"""Vectors of 16 floats inside compiled kernels, said outright instead of hoped for.

A compiler may or may not turn a loop into vector instructions, and decides by itself where a multiply and an add are
fused. Where bits are promised and time matters both should be visible in the source: a `Vector` is a value of 16
floats in one AVX-512 or two AVX2 registers, and `fma` always rounds once.

A `Vector` has a whole-number twin, `Integers`: 16 numbers of 32 bits, or 16 groups of four bytes, for `dot`.

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
_INT = ir.IntType(32)
_IR = ir.VectorType(ir.FloatType(), LANES)
_IR_INTS = ir.VectorType(_INT, LANES)


def _has(feature: str) -> bool:
    """Whether code is compiled for a processor with this feature."""
    features: str = config.CPU_FEATURES or get_host_cpu_features()  # type: ignore[attr-defined]
    return f"+{feature}" in features.split(",")


def has_wide_registers() -> bool:
    """Whether code is compiled for AVX-512: 32 registers of a whole Vector, where AVX2 has 16 of half a one."""
    return _has("avx512f")


def has_byte_dot_products() -> bool:
    """Whether one instruction multiplies 64 pairs of bytes and adds them up by fours."""
    return _has("avx512vnni")


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector16")


VECTOR = _VectorType()


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _IR)


class _IntegersType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Integers16")


INTEGERS = _IntegersType()


@register_model(_IntegersType)
class _IntegersModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _IR_INTS)


def _address(context, builder, array_type, array, index, read_as=_IR):
    """Point to element `index` of a flat array; the index is trusted."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), read_as.as_pointer())


def _sixteen_times(builder, number):
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_IR_INTS, [0] * LANES))


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
def times(typing_context, left, right):
    """Left * right in each lane."""

    def generate(context, builder, signature, arguments):
        return builder.fmul(*arguments)

    return VECTOR(VECTOR, VECTOR), generate


@_intrinsic
def load_weights(typing_context, array, index, steps, step_index):
    """Read 16 consecutive numbers of a flat array: floats as they are, bytes with a sign times 16 floats of `steps`."""
    few = ir.VectorType(ir.IntType(8), LANES)

    def generate_floats(context, builder, signature, arguments):
        vector = builder.load(_address(context, builder, signature.args[0], *arguments[:2]))
        vector.align = 4
        return vector

    def generate_products(context, builder, signature, arguments):
        array, index, steps, step_index = arguments
        numbers = builder.load(_address(context, builder, signature.args[0], array, index, read_as=few))
        numbers.align = 1
        step = builder.load(_address(context, builder, signature.args[2], steps, step_index))
        step.align = 4
        return builder.fmul(builder.sitofp(builder.sext(numbers, _IR_INTS), _IR), step)

    generate = generate_products if array.dtype == types.int8 else generate_floats
    return VECTOR(array, types.intp, steps, types.intp), generate


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


# Whole numbers.


@_intrinsic
def load_groups(typing_context, array, index):
    """Read 16 groups of four bytes, from byte `index` of a flat array of bytes on."""

    def generate(context, builder, signature, arguments):
        groups = builder.load(
            _address(context, builder, signature.args[0], arguments[0], arguments[1], read_as=_IR_INTS)
        )
        groups.align = 1
        return groups

    return INTEGERS(array, types.intp), generate


@_intrinsic
def spread_group(typing_context, array, index):
    """Sixteen times the four bytes from byte `index` of a flat array of bytes on."""

    def generate(context, builder, signature, arguments):
        group = builder.load(_address(context, builder, signature.args[0], arguments[0], arguments[1], read_as=_INT))
        group.align = 1
        return _sixteen_times(builder, group)

    return INTEGERS(array, types.intp), generate


@_intrinsic
def spread_integer(typing_context, array, index):
    """Sixteen times one element of a flat array of 32-bit numbers."""

    def generate(context, builder, signature, arguments):
        return _sixteen_times(
            builder,
            builder.load(_address(context, builder, signature.args[0], arguments[0], arguments[1], read_as=_INT)),
        )

    return INTEGERS(array, types.intp), generate


@_intrinsic
def dot_instruction(typing_context, sums, unsigned, signed):
    """Add to each sum its group's dot product of unsigned with signed bytes; only `has_byte_dot_products`."""

    def generate(context, builder, signature, arguments):
        function_type = ir.FunctionType(_IR_INTS, [_IR_INTS] * 3)
        name = "llvm.x86.avx512.vpdpbusd.512"
        return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)

    return INTEGERS(INTEGERS, INTEGERS, INTEGERS), generate


@_intrinsic
def dot_portable(typing_context, sums, unsigned, signed):
    """As `dot_instruction`, on any processor: exact, so the same numbers."""

    def generate(context, builder, signature, arguments):
        sums, unsigned, signed = arguments
        halves = ir.VectorType(ir.IntType(16), 2 * LANES)
        eight = ir.Constant(halves, [8] * (2 * LANES))
        unsigned, signed = builder.bitcast(unsigned, halves), builder.bitcast(signed, halves)
        lower = builder.lshr(builder.shl(unsigned, eight), eight), builder.ashr(builder.shl(signed, eight), eight)
        upper = builder.lshr(unsigned, eight), builder.ashr(signed, eight)
        for pair in (lower, upper):  # bytes 0 and 2 of every group, then 1 and 3
            sums = builder.add(sums, _pairs(builder, *pair))
        return sums

    return INTEGERS(INTEGERS, INTEGERS, INTEGERS), generate


def _pairs(builder, left, right):
    """Multiply 32 pairs of 16-bit numbers and add neighbours: a pattern that compilers have an instruction for."""
    wide = ir.VectorType(_INT, 2 * LANES)
    products = builder.mul(builder.sext(left, wide), builder.sext(right, wide))
    even, odd = (ir.Constant(_IR_INTS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    return builder.add(
        builder.shuffle_vector(products, products, even), builder.shuffle_vector(products, products, odd)
    )


dot: Any = dot_instruction if has_byte_dot_products() else dot_portable
"""Sums, unsigned bytes, signed bytes -> sums: the fastest that this processor has."""


@_intrinsic
def to_floats(typing_context, integers):
    """The floats nearest to 16 whole numbers."""

    def generate(context, builder, signature, arguments):
        return builder.sitofp(arguments[0], _IR)

    return VECTOR(INTEGERS), generate


@_intrinsic
def bits(typing_context, vector):
    """The floats' bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _IR_INTS)

    return INTEGERS(VECTOR), generate


@_intrinsic
def magnitude_bits(typing_context, vector):
    """The floats' bits without the sign: ordered as magnitudes are, infinity behind all numbers and NaN behind it."""

    def generate(context, builder, signature, arguments):
        return builder.and_(builder.bitcast(arguments[0], _IR_INTS), ir.Constant(_IR_INTS, [0x7FFFFFFF] * LANES))

    return INTEGERS(VECTOR), generate


@_intrinsic
def larger(typing_context, left, right):
    """The larger number of each lane."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed(">", *arguments), *arguments)

    return INTEGERS(INTEGERS, INTEGERS), generate


@_intrinsic
def plus(typing_context, left, right):
    """Left + right in each lane."""

    def generate(context, builder, signature, arguments):
        return builder.add(*arguments)

    return INTEGERS(INTEGERS, INTEGERS), generate


def _reduction(name):
    def typed(typing_context, integers):
        def generate(context, builder, signature, arguments):
            function_type = ir.FunctionType(_INT, [_IR_INTS])
            intrinsic_name = f"llvm.vector.reduce.{name}.v{LANES}i32"
            return builder.call(
                cgutils.get_or_insert_function(builder.module, function_type, intrinsic_name), arguments
            )

        return types.int32(INTEGERS), generate

    return typed


largest: Any = _intrinsic(_reduction("smax"))
"""The largest of 16 whole numbers."""

total: Any = _intrinsic(_reduction("add"))
"""The sum of 16 whole numbers."""


@_intrinsic
def store_low_bytes(typing_context, array, index, integers):
    """Write the lowest byte of each of 16 numbers to a flat array of bytes."""

    def generate(context, builder, signature, arguments):
        low = ir.VectorType(ir.IntType(8), LANES)
        address = _address(context, builder, signature.args[0], arguments[0], arguments[1], read_as=low)
        builder.store(builder.trunc(arguments[2], low), address).align = 1
        return context.get_dummy_value()

    return types.none(array, types.intp, INTEGERS), generate
