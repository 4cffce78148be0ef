"""Checksums of arrays that do not depend on how the arrays are split over devices.

Every 32-bit word of an array is mixed with its place in row-major order, and the mixed
words are added. Integer addition gives the same sum in any order, so devices and
processes add up what they hold, and a run may be verified on another mesh than the one
that saved it.

For one place the mixing is a bijection: damage within one word is found for certain.
Other damage, exchanged elements among it, goes unseen with a probability of 2**-64.
"""

from hashlib import sha256
from json import dumps

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

_FIRST = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_SECOND = (0xC2B2AE3D, 0x7FEB352D, 0x846CA68B)
"""Odd multipliers of the two sums: of the place, and of the two rounds of mixing.

The rounds are those of MurmurHash3 (Appleby, 2011) and of the search for 32-bit
bijections by Wellons, "Prospecting for Hash Functions" (2018).
"""


def array_checksum(leaf: Array) -> UInt32[Array, "2"]:
    """Returns the 64-bit checksum of an array, as two words on its devices.

    Of several processes all must call it.

    >>> ascending = array_checksum(jnp.arange(3.0))
    >>> exchanged = array_checksum(jnp.array([0.0, 2.0, 1.0]))
    >>> bool((ascending == exchanged).any())
    False
    """
    return _checksum(leaf)


def checksum_text(words: UInt32[np.ndarray, "2"]) -> str:
    """Writes a checksum as 16 hexadecimal digits.

    >>> checksum_text(np.array([1, 255], np.uint32))
    '00000001000000ff'
    """
    return "".join(f"{int(word):08x}" for word in words)


def json_checksum(value: object) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its fields.

    >>> json_checksum({"a": 1, "b": [2]}) == json_checksum({"b": [2], "a": 1})
    True
    """
    return sha256(dumps(value, sort_keys=True).encode()).hexdigest()


@jax.jit
def _checksum(leaf: Array) -> Array:
    words = _words(leaf)
    place = _places(words.shape)
    # Beyond 2**32 words a place repeats; the row then tells such places apart.
    row = jax.lax.broadcasted_iota(jnp.uint32, words.shape, 0)
    first = _mixed(words ^ (place * _word(_FIRST[0])), _FIRST, (16, 13, 16))
    shifted = words + place * _word(_SECOND[0]) + row * _word(_SECOND[1])
    second = _mixed(shifted, _SECOND, (16, 15, 16))
    # In one reduction XLA fuses everything before it; in two it writes both arrays of
    # mixed words to memory, which takes ten times as long.
    zero = _word(0)
    sums = jax.lax.reduce(
        (first, second),
        (zero, zero),
        lambda some, more: (some[0] + more[0], some[1] + more[1]),
        tuple(range(words.ndim)),
    )
    return jnp.stack(sums)


def _words(leaf: Array) -> Array:
    """Returns the bits of every element as 32-bit words, with at least one axis."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    is_integer = jnp.issubdtype(leaf.dtype, jnp.integer)
    if leaf.dtype == jnp.bool_ or (is_integer and jnp.iinfo(leaf.dtype).bits < 8):
        leaf = leaf.astype(jnp.int8)
    if leaf.dtype.itemsize == 8:
        unsigned = jnp.uint32
    else:
        unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    words = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    return jnp.atleast_1d(words)


def _places(shape: tuple[int, ...]) -> Array:
    """Returns the place of every word in row-major order, modulo 2**32."""
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place + along * _word(stride % 2**32)
        stride *= shape[axis]
    return place


def _mixed(
    words: Array, constants: tuple[int, int, int], shifts: tuple[int, int, int]
) -> Array:
    """Applies a bijection of 32-bit words under which every bit moves every other."""
    words = words ^ (words >> _word(shifts[0]))
    words = words * _word(constants[1])
    words = words ^ (words >> _word(shifts[1]))
    words = words * _word(constants[2])
    return words ^ (words >> _word(shifts[2]))


def _word(value: int) -> Array:
    return jnp.asarray(np.uint32(value))
