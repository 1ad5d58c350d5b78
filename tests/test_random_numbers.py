"""Random numbers that don't depend on the number of workers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from pyg_sar.kernels import ops
from pyg_sar.space import draws
from pyg_sar.space.draws import Draws, draw, philox, philox_rows

CPU = torch.device("cpu")
FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16

# Philox ######################################################################


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # The test vectors that come with the paper's library, Random123 (kat_vectors).
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_published_words(counter, key, words):
    counters = [torch.tensor([int(word, 16)]) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    found = philox(tuple(counters), (low, high))
    assert [f"{int(word):08x}" for word in found] == words.split()


@pytest.mark.skipif(not ops.built, reason="the C++ kernels are not built")
def test_the_kernel_gives_the_same_words():
    ids = torch.cat([torch.arange(300), torch.tensor([2**32 - 1, 2**32, 2**62 + 5])])
    for width in (0, 1, 3, 4, 63, 64, 65, 130):
        for key in (0, 1, 2**63 - 1, 2**64 - 1):
            native = philox_rows(ids, width, key, native=True)
            assert torch.equal(native, philox_rows(ids, width, key, native=False))
    torch.library.opcheck(torch.ops.pyg_sar.philox_rows.default, (ids, 5, 1, 2))


@pytest.mark.parametrize("native", [False, None])
def test_rows_of_words_depend_on_id_place_and_key_alone(native):
    ids = torch.tensor([7, 0, 2**40 + 3, 7])
    rows = philox_rows(ids, 6, 2**63 - 5, native=native)
    assert rows.shape == (4, 6) and 0 <= int(rows.min()) and int(rows.max()) < 2**32
    assert torch.equal(rows[0], rows[3])
    for k, number in enumerate(ids):
        assert torch.equal(philox_rows(number.view(1), 9, 2**63 - 5)[0, :6], rows[k])
    assert rows[:3].unique().numel() == 18
    assert not torch.equal(philox_rows(ids, 6, 2**63 - 6), rows)
    assert philox_rows(ids, 0, 1).shape == (4, 0) and philox_rows(ids[:0], 3, 1).shape == (0, 3)


# One process's numbers #######################################################


FILLS = {
    "dropout": (draws.dropout(0.6), lambda t: F.dropout(torch.ones_like(t), 0.6)),
    "bernoulli": (draws.bernoulli(0.3), lambda t: t.bernoulli_(0.3)),
    "rand": (draws.uniform(), lambda t: torch.rand(t.shape, dtype=t.dtype)),
    "uniform": (draws.uniform(-2, 3), lambda t: t.uniform_(-2, 3)),
    "randn": (draws.normal(), lambda t: torch.randn(t.shape, dtype=t.dtype)),
    "normal": (draws.normal(1, 3), lambda t: t.normal_(1, 3)),
    "exponential": (draws.exponential(2.0), lambda t: t.exponential_(2.0)),
}


def _same_as_one_process(fill, plain, shape, dtype, parts=3):
    """Draws twice in a row: what comes next must be the same, too."""
    total, *rest = shape
    torch.manual_seed(12)
    expected = [plain(torch.empty(shape, dtype=dtype)) for _ in range(2)]
    state = torch.get_rng_state()
    owner = torch.randint(parts, (total,))
    for part in range(parts):
        ids = (owner == part).nonzero().view(-1).flip(0)
        torch.manual_seed(12)
        for whole in expected:
            given = {"dtype": dtype, "device": CPU, "draws": Draws("same")}
            assert torch.equal(draw(fill, rest, ids, total, **given), whole[ids])
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(not ops.built, reason="the C++ kernels are not built")
def test_rows_of_bernoulli_without_those_of_others(monkeypatch):
    """From any place in the generator's block of 624 words; half a value is in the next block."""
    if not draws._is_mersenne_twister(torch.float64):
        pytest.skip("this processor's bernoulli_ is a library's")
    monkeypatch.setattr(draws, "drawn_rows", None)  # not called
    for before in (0, 1, 311, 623):
        for shape in ([0, 3], [1, 1], [700, 1], [90, 7], [3, 1000], [5, 4, 3]):
            for p in (0.0, 2.0**-60, 0.5, 0.7, 1.0):
                torch.manual_seed(before)
                torch.rand(before)  # takes a word each
                start = torch.get_rng_state()
                expected = torch.empty(shape, dtype=torch.bfloat16).bernoulli_(p)
                after = torch.get_rng_state()
                for ids in (torch.arange(shape[0]), torch.randint(max(shape[0], 1), (shape[0],))):
                    torch.set_rng_state(start)
                    found = draws.bernoulli_rows(p, shape[1:], ids, shape[0], torch.bfloat16)
                    assert torch.equal(found, expected[ids] != 0)
                    assert torch.equal(torch.get_rng_state(), after)
    order = torch.tensor([1, 0], dtype=torch.int32)
    given = start, torch.tensor([4, 1]), order, 9, 3, 0.5
    torch.library.opcheck(torch.ops.pyg_sar.bernoulli_rows.default, given)
    for wrong in ([4, 1], [9], [-1]):
        with pytest.raises(RuntimeError, match="ascending 'ids' below 9"):
            torch.ops.pyg_sar.bernoulli_rows(start, torch.tensor(wrong), None, 9, 3, 0.5)
    with pytest.raises(RuntimeError, match="'order' of ids"):
        torch.ops.pyg_sar.bernoulli_rows(start, torch.tensor([1, 4]), order + 1, 9, 3, 0.5)


@pytest.mark.parametrize("name", FILLS)
def test_same_is_what_one_process_draws(name):
    fill, plain = FILLS[name]
    for dtype in FLOATS:
        for total in range(41):
            _same_as_one_process(fill, plain, [total], dtype)
        for shape in ([5, 3], [16, 2], [1003, 7], [257, 4, 3], [4, 0]):
            _same_as_one_process(fill, plain, shape, dtype)


@pytest.mark.parametrize("name", FILLS)
def test_same_comes_in_pieces(name, monkeypatch):
    fill, plain = FILLS[name]
    monkeypatch.setattr(draws, "_PIECE", 64)
    for dtype in FLOATS[:2]:
        for shape in ([1003], [65], [70], [80], [341, 3], [64, 17]):
            _same_as_one_process(fill, plain, shape, dtype)
    largest = []
    whole = draws.Fill.whole

    def watched(self, shape, **given):
        largest.append(shape[0])
        return whole(self, shape, **given)

    monkeypatch.setattr(draws.Fill, "whole", watched)
    given = {"dtype": torch.float64, "device": CPU, "draws": Draws("same", limit=8 * 1003)}
    draw(fill, [], torch.arange(5), 1003, **given)
    if draws._comes_in_pieces(partial(fill.whole, dtype=torch.float64, device=CPU)):
        assert 1003 not in largest


def test_same_is_refused_beyond_its_limit(monkeypatch):
    monkeypatch.setattr(draws, "_PIECE", 64)
    monkeypatch.setattr(draws, "_comes_in_pieces", lambda make: False)
    given = {"dtype": torch.float32, "device": CPU}
    ids = torch.tensor([0, 99])
    draw(draws.normal(), [3], ids, 100, **given, draws=Draws("same", limit=1200))
    with pytest.raises(ValueError, match=r"\[100, 3\].*1,200 bytes.*random='keyed'"):
        draw(draws.normal(), [3], ids, 100, **given, draws=Draws("same", limit=1199))
    draw(draws.normal(), [3], ids, 100, **given, draws=Draws("keyed", limit=0))


def test_pieces_that_would_be_other_numbers_are_noticed(monkeypatch):
    def as_mkl(self, shape, dtype, device):
        """Fills a tensor of any size from one number of the generator."""
        own = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        return torch.rand(shape, generator=own, dtype=dtype)

    make = lambda shape: draws.uniform().whole(shape, torch.float32, CPU)  # noqa: E731
    assert draws._comes_in_pieces(make)
    monkeypatch.setattr(draws.Fill, "whole", as_mkl)
    state = torch.get_rng_state()
    assert not draws._comes_in_pieces(make)
    assert torch.equal(torch.get_rng_state(), state)


# Keyed #######################################################################


@pytest.mark.parametrize("name", FILLS)
def test_keyed_rows_are_functions_of_their_ids(name):
    fill = FILLS[name][0]
    for dtype in FLOATS:
        given = {"dtype": dtype, "device": CPU, "draws": Draws("keyed", key=77)}
        whole = draw(fill, [2, 3], torch.arange(50), 50, **given)
        assert whole.shape == (50, 2, 3) and whole.dtype == dtype
        ids = torch.tensor([3, 49, 0, 3])
        assert torch.equal(draw(fill, [2, 3], ids, 50, **given), whole[ids])
        assert draw(fill, [2, 3], ids[:0], 50, **given).shape == (0, 2, 3)
        other = dict(given, draws=Draws("keyed", key=78))
        assert not torch.equal(draw(fill, [2, 3], torch.arange(50), 50, **other), whole)


def test_keyed_rows_come_block_by_block(monkeypatch):
    given = {"dtype": torch.float32, "device": CPU, "draws": Draws("keyed", key=5)}
    whole = draw(draws.normal(), [7], torch.arange(40), 40, **given)
    monkeypatch.setattr(draws, "_WORDS", 60)
    assert torch.equal(draw(draws.normal(), [7], torch.arange(40), 40, **given), whole)


def test_each_call_has_a_key_of_its_own():
    torch.manual_seed(3)
    given = {"dtype": torch.float32, "device": CPU, "draws": Draws("keyed")}
    found = [draw(draws.uniform(), [], torch.arange(9), 9, **given) for _ in range(2)]
    assert not torch.equal(*found)
    torch.manual_seed(3)
    assert torch.equal(draw(draws.uniform(), [], torch.arange(4, 9), 9, **given), found[0][4:])
    fixed = Draws("keyed").fixed()
    assert fixed.key is not None and fixed.fixed() is fixed and Draws("same").fixed().key is None


def test_keyed_numbers_have_the_distribution():
    ids, given = torch.arange(40_000), {"device": CPU, "draws": Draws("keyed", key=1)}

    def drawn(fill, dtype=torch.float64):
        return draw(fill, [4], ids, 40_000, dtype=dtype, **given).double().view(-1)

    def close(values, mean, variance):
        error = (variance / values.numel()) ** 0.5
        assert abs(float(values.mean()) - mean) < 5 * error
        assert abs(float(values.var()) / variance - 1) < 0.05

    for dtype in (torch.float64, torch.float32):
        close(drawn(draws.uniform(-1, 3), dtype), 1, 16 / 12)
        close(drawn(draws.normal(2, 3), dtype), 2, 9)
        close(drawn(draws.exponential(2), dtype), 0.5, 0.25)
        close(drawn(draws.bernoulli(0.3), dtype), 0.3, 0.21)
        close(drawn(draws.dropout(0.75), dtype), 1, 3)
        assert sorted(drawn(draws.dropout(0.75), dtype).unique().tolist()) == [0, 4]
    rows = drawn(draws.normal()).view(-1, 4).T
    assert (
        float(torch.corrcoef(torch.cat([rows, rows.roll(1, 1)])).fill_diagonal_(0).abs().max())
        < 0.03
    )
    for dtype in FLOATS:
        values = draw(draws.uniform(), [4], ids, 40_000, dtype=dtype, **given)
        assert 0 <= float(values.min()) and float(values.max()) < 1
    assert drawn(draws.dropout(1)).abs().max() == 0 and drawn(draws.dropout(0)).min() == 1


def test_what_cannot_be_drawn_is_named():
    with pytest.raises(ValueError, match="'random' to be 'same' or 'keyed' .got 'other'"):
        Draws("other")
    with pytest.raises(ValueError, match="'p' to be a probability .got 1.5"):
        draws.dropout(1.5)
    given = {"dtype": torch.float32, "device": CPU}
    for strength in draws.STRENGTHS:
        with pytest.raises(IndexError, match=r"\[0, 4\) .got 0 to 4"):
            draw(draws.normal(), [], torch.tensor([0, 4]), 4, **given, draws=Draws(strength))
