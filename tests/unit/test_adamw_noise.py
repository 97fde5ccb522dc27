"""The noise that weights are rounded by: published Philox vectors, and one word per element in whatever pieces."""

from __future__ import annotations

import math

import pytest
import torch

from halo_core.kernels.adamw.boxes import Box
from halo_core.kernels.adamw.noise import WORDS, drawn, key_of, philox, words

ALL = 2**64 - 1
# counter (four words), key (two words) -> result. Source: the known answers that come with Random123, philox4x32-10.
PUBLISHED = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)  # fmt: skip


def joined(low: int, high: int) -> int:
    return low | high << 32


def plainly(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Return Philox4x32-10 by Python's own integers, word by word as the paper writes it."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ k, second % 2**32, (first >> 32) ^ d ^ m, first % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors_come_out(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    counters = torch.tensor([signed(joined(*counter[:2]))])
    assert philox(joined(*key), counters, joined(*counter[2:]))[0].tolist() == list(expected)
    assert plainly(counter, key) == expected


def test_words_are_those_of_an_elements_place_at_any_size() -> None:
    key, step = key_of(3, "model.weight"), 2**33 + 7
    for offset in (0, 1, 6, 2**31 - 1, 2**31 + 2, 2**34 + 3, 2**52 + 1):
        quad = offset // WORDS
        call = plainly((quad % 2**32, quad >> 32, step % 2**32, step >> 32), (key % 2**32, key >> 32))
        assert words(key, step, torch.tensor([offset]), 1).tolist() == [[call[offset % WORDS]]]


def test_a_row_has_the_same_words_from_wherever_it_is_begun() -> None:
    whole = words(1, 2, torch.tensor([0]), 200)[0]
    for begin in range(9):
        for length in (1, 2, 3, 5, 8, 50):
            assert torch.equal(words(1, 2, torch.tensor([begin]), length)[0], whole[begin : begin + length])
    rows = words(1, 2, torch.tensor([3, 0, 50, 97]), 13)
    assert torch.equal(rows, torch.stack([whole[begin : begin + 13] for begin in (3, 0, 50, 97)]))


def test_boxes_in_pieces_of_any_size_get_every_element_its_word_once() -> None:
    whole = words(5, 1, torch.tensor([0]), 1000)[0]
    boxes = (
        Box(local=torch.tensor([0, 7, 14]), offset=torch.tensor([10, 110, 210]), length=7),
        Box(local=torch.tensor([21, 60]), offset=torch.tensor([501, 601]), length=39),
    )
    expected = torch.cat([whole[begin : begin + box.length] for box in boxes for begin in box.offset.tolist()])
    for block in (1, 5, 7, 16, 1000):
        found = torch.full((99,), -1)
        for where, own in drawn(5, 1, boxes, block):
            assert (found[where] == -1).all()
            found[where] = own
        assert torch.equal(found, expected)


def test_seed_name_step_and_place_each_change_the_words() -> None:
    def draw(seed: int = 0, name: str = "a", step: int = 1, begin: int = 0) -> list[int]:
        return words(key_of(seed, name), step, torch.tensor([begin]), 8)[0].tolist()

    drawn_words = [draw(), draw(seed=1), draw(name="b"), draw(step=2), draw(begin=8)]
    assert len({tuple(own) for own in drawn_words}) == len(drawn_words)
    assert draw() == draw()
    assert key_of(-1, "a") == key_of(ALL, "a"), "a seed is taken modulo 2**64"


def test_both_halves_of_a_word_are_even_and_do_not_follow_each_other() -> None:
    number = 200_000
    own = words(key_of(0, "weight"), 1, torch.tensor([0]), number)[0]
    low, high = (own & 0xFFFF).double(), (own >> 16).double()
    # Five standard deviations: of the mean of a uniform variable over 65536 values, and of a correlation of zero.
    for half in (low, high):
        assert float(half.mean()) == pytest.approx(32767.5, abs=5 * 65536 / math.sqrt(12 * number))
    assert abs(float(torch.corrcoef(torch.stack([low, high]))[0, 1])) < 5 / math.sqrt(number)
    assert abs(float(torch.corrcoef(torch.stack([low[:-1], low[1:]]))[0, 1])) < 5 / math.sqrt(number)
