"""Which of sixteen tokens may still win a race, told by the first half of their dice: noise.py in vectors.

Philox takes twenty multiplications a token, and of fifty thousand tokens few can win. A compiler does not see that
sixteen of them can be computed side by side, so it is said outright, as in simd.py. What comes out is the upper
half of the uniform number u, enough to rule out nearly all; who is left is looked at with all of its bits.

The function can be called only from compiled code.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_intrinsic: Any = intrinsic  # what it makes has no type outside compiled code

LANES = 16
_INT, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, LANES), ir.VectorType(_FLOAT, LANES)
_PAIRS = ir.VectorType(_LONG, LANES // 2)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@_intrinsic
def contenders(typing_context, weights, first, limit, seed, position, choice, purpose):
    """A bit for each of the tokens first .. first + 15 with (1 - u) * 2**32 < weight * limit + 1, u by its upper half.

    weights is a flat array of floats, limit a float, the others are as in `noise.uniform`.
    """

    def generate(context, builder, signature, arguments):
        array, index, limit, seed, *counters = arguments
        upper = _upper_half(builder, index, seed, counters)
        missing = builder.uitofp(builder.not_(upper), _FLOATS)
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, array).data
        weight = builder.load(builder.bitcast(builder.gep(data, [index]), _FLOATS.as_pointer()))
        weight.align = 4
        reach = builder.fadd(builder.fmul(weight, _spread(builder, limit)), ir.Constant(_FLOATS, [1.0] * LANES))
        found = builder.fcmp_ordered("<", missing, reach)
        return builder.zext(builder.bitcast(found, ir.IntType(LANES)), _INT)

    words = (types.uint32,) * 3
    return types.uint32(weights, types.intp, types.float32, types.uint64, *words), generate


def _upper_half(builder, first, seed, counters):
    """The first word of each token's block of Philox4x32-10."""
    places = ir.Constant(_INTS, list(range(LANES)))
    c0 = builder.add(_spread(builder, builder.trunc(first, _INT)), places)
    c1, c2, c3 = (_spread(builder, counter) for counter in counters)
    keys = [builder.trunc(seed, _INT), builder.trunc(builder.lshr(seed, ir.Constant(_LONG, 32)), _INT)]
    for _ in range(_ROUNDS):
        high_a, low_a = _product(builder, c0, _MULTIPLIERS[0])
        high_b, low_b = _product(builder, c2, _MULTIPLIERS[1])
        c0 = builder.xor(builder.xor(high_b, c1), _spread(builder, keys[0]))
        c2 = builder.xor(builder.xor(high_a, c3), _spread(builder, keys[1]))
        c1, c3 = low_b, low_a
        keys = [builder.add(key, ir.Constant(_INT, step)) for key, step in zip(keys, _WEYL, strict=True)]
    return c0


def _product(builder, words, multiplier):
    """The upper and lower words of 16 words times a constant: those in even lanes, then those in odd ones."""
    factor = ir.Constant(_PAIRS, [multiplier] * (LANES // 2))
    half = ir.Constant(_PAIRS, [32] * (LANES // 2))
    lower = ir.Constant(_PAIRS, [0xFFFFFFFF] * (LANES // 2))
    upper = ir.Constant(_PAIRS, [0xFFFFFFFF00000000] * (LANES // 2))
    pairs = builder.bitcast(words, _PAIRS)
    even = builder.mul(builder.and_(pairs, lower), factor)
    odd = builder.mul(builder.lshr(pairs, half), factor)
    high = builder.or_(builder.lshr(even, half), builder.and_(odd, upper))
    low = builder.or_(builder.and_(even, lower), builder.shl(odd, half))
    return builder.bitcast(high, _INTS), builder.bitcast(low, _INTS)


def _spread(builder, number):
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_INTS, [0] * LANES))
