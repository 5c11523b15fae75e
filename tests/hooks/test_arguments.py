"""Arguments of wrong types at the public edge: what is refused, and what is taken although it is of
another class.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, Int, jaxtyped
from torch import Tensor
from typing_extensions import TypeAliasType, TypeVar

from bridge.arguments import check_types, refuse_wrong_types, shown


class HasFacts(Protocol):
    cfg: str


class Named:
    cfg = "a"


_Of = TypeVar("_Of", bound=np.generic)
#: What NumPy 2.5 has in place of a class, from Python 3.12 on.
ArrayOf = TypeAliasType("ArrayOf", np.ndarray[tuple[Any, ...], np.dtype[_Of]], type_params=(_Of,))


OF: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "int": (int, [1, np.int64(1)], [True, 1.0, "1", None, torch.tensor(1)]),
    "float": (float, [1, 0.5, np.float32(1)], [True, "1", None, torch.tensor(1.0)]),
    "int or none": (int | None, [1, None], [True, "1"]),
    "bool": (bool, [True, False], [1, 0, None, "True"]),
    "str": (str, ["a"], [b"a", 1, None]),
    "names": (Sequence[str], [["a"], ("a",), []], ["ab", {"a": 1}, None, torch.zeros(2)]),
    "name or names": (str | Sequence[str], ["ab", ["a"]], [1, None]),
    "indices": (Sequence[int], [[1], np.array([1, 2])], ["1", 1, torch.tensor([1])]),
    "matrix": (
        Float[Tensor, "row column"],
        [torch.zeros(2, 3)],
        [torch.zeros(2), torch.zeros(2, 3).long(), [[1.0]]],
    ),
    "ids": (Int[Tensor, "..."], [torch.tensor(1), torch.tensor([[1]])], [torch.zeros(1), 1]),
    "aliased": (
        Float[Tensor, "..."] | ArrayOf[Any],
        [torch.zeros(2), np.zeros(2)],
        ["a", 1, None, [1.0]],
    ),
    "mapping": (Mapping[str, int], [{}, {"a": 1}], [[("a", 1)], None]),
    "several of one": (tuple[int, ...], [(), (1,), (1, 2)], [(1, "2"), [1], 1]),
    "one of each": (tuple[str, int], [("a", 1)], [("a",), ("a", 1, 2), (1, "a"), ["a", 1]]),
    "rows": (Sequence[Sequence[int]], [[], [[1], []]], [[1], [["a"]], ["ab"]]),
    "of several": (list[int | str], [[1, "a"]], [[1, None], (1,)]),
    "set": (set[str], [{"a"}], [{1}, ["a"]]),
    "class": (type[Exception], [ValueError], [ValueError(), int, "ValueError"]),
    "once": (Iterable[str], [iter(["a"]), ["a"]], [1, [1]]),
    "function": (Callable[..., Any], [len, lambda: 1], [1, "len"]),
    "literal": (
        Literal["a", "b"],
        ["a", "z"],
        [1, None],
    ),  # which of them there are, is the function's to say
    "protocol": (HasFacts, [Named()], [1, "a", None, torch.zeros(1)]),
    "path": (str | Path, ["a", Path("a")], [1, None, b"a"]),
    "anything": (Any, [1, None, "a"], []),
}


@pytest.mark.parametrize("kind", OF)
def test_what_fits(kind):
    hint, right, wrong = OF[kind]

    def f(x):
        return x

    f.__qualname__, f.__annotations__ = "f", {"x": hint}
    decorated = refuse_wrong_types(f)
    for value in right:
        check_types("f", {"x": value}, {"x": hint})
        assert decorated(value) is value
        assert decorated(x=value) is value
    for value in wrong:  # also of what was remembered of the right ones
        for call in (
            lambda: check_types("f", {"x": value}, {"x": hint}),  # noqa: B023
            lambda: decorated(value),  # noqa: B023
        ):
            with pytest.raises(TypeError, match=r"^x is .*; f takes .* there$"):
                call()


def test_a_decorated_function():
    @refuse_wrong_types
    def power(base: int, exponent: "int | None" = None, *more: int, **others: int) -> int:
        """What it does."""
        return base ** (exponent or 1)

    assert (power(3), power(3, exponent=2), power.__doc__) == (3, 9, "What it does.")
    assert power(2, 3, "unseen", other="unseen") == 8
    with pytest.raises(
        TypeError,
        match=r"exponent is '2'; test_a_decorated_function.<locals>.power takes int \| None",
    ):
        power(3, "2")
    with pytest.raises(TypeError, match=r"missing 1 required"):
        power()
    with pytest.raises(TypeError, match=r"given|unexpected"):
        refuse_wrong_types(lambda: None)(1)  # type: ignore[call-arg]

    @refuse_wrong_types
    def alone(x: int, /, **others: object) -> object:
        return others

    assert alone(1, x="another") == {"x": "another"}


def test_axes_of_a_callers_function_are_its_own() -> None:
    """A user's function may check its shapes by jaxtyping, too."""

    @refuse_wrong_types
    def ours(x: Float[Tensor, "row column"]) -> int:
        return len(x)

    @jaxtyped(typechecker=beartype)
    def theirs(x: Float[Tensor, "row column"]) -> int:
        return ours(x[:1])

    assert theirs(torch.zeros(2, 3)) == 1


def test_what_is_shown():
    assert shown(torch.zeros(2, 3)) == "a tensor [2, 3] of torch.float32"
    assert shown("a") == "'a'"
    assert len(shown("a" * 1000)) == 80


def test_properties_are_not_computed_to_see_what_something_is() -> None:
    class Wanted(Protocol):
        costly: int

    class Given:
        @property
        def costly(self) -> int:
            raise AssertionError("it was computed")

    check_types("f", {"x": Given()}, {"x": Wanted})
    with pytest.raises(TypeError, match="x is"):
        check_types("f", {"x": 3}, {"x": Wanted})


def test_text_in_the_place_of_tokens_is_told_how_to_make_them():
    @refuse_wrong_types
    def study(prompts: Int[Tensor, "batch pos"] | Mapping[str, Any], vector: Tensor | None = None):
        pass

    for text in ("Mary", ["Mary", "John"]):
        with pytest.raises(TypeError, match=r"bridge\.to_tokens makes tokens of text"):
            study(text)
    with pytest.raises(TypeError, match=r"there$"):
        study(torch.zeros(1, 2, dtype=torch.long), "Mary")
    with pytest.raises(TypeError, match=r"there$"):
        study(1)
