"""docs/architecture.md draws every room, and its picture of a call is the way that the call
takes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType

from bridge import TransformerBridge
from tests.test_structure import MAY_USE, ON_TOP, ROOT
from tools.structure import MARKS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = {room.rpartition(".")[2] for room in (*MAY_USE, *ON_TOP)} - {"version"}


def test_every_room_is_in_a_tier_and_stands_on_one_floor() -> None:
    begin, end = MARKS["tiers"]
    parts = PAGE.split(begin)[1].split(end)[0]
    assert not {room for room in ROOMS if not re.search(rf"\b{room}\b", parts)}
    floors = re.findall(r"^\| (?:top|\d) \| (.+?) \|", PAGE, re.MULTILINE)
    drawn = [room for floor in floors for room in re.findall(r"`(\w+)`", floor)]
    assert sorted(drawn) == sorted(ROOMS)


def test_a_room_uses_no_floor_above_its_own() -> None:
    rows = re.findall(r"^\| (top|\d) \| (.+?) \|", PAGE, re.MULTILINE)
    height = {
        room: 10 if at == "top" else int(at)
        for at, rooms in rows
        for room in re.findall(r"`(\w+)`", rooms)
    }
    short = {room: room.rpartition(".")[2] for room in MAY_USE}
    wrong = [
        (room, used)
        for room, all_used in MAY_USE.items()
        for used in all_used
        if room != "bridge"
        and used != "bridge.version"
        and height[short[used]] > height[short[room]]
    ]
    assert not wrong


def entered(prompt: str, names_filter: str) -> list[tuple[str, str]]:
    """The functions of ours that the call enters, each with its file, in the order in which they
    are first entered.
    """
    bridge = TransformerBridge.boot_embedded()
    bridge.run_with_cache(
        prompt, names_filter=names_filter
    )  # what is made once is not in the picture
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        bridge.run_with_cache(prompt, names_filter=names_filter)
    finally:
        sys.setprofile(None)
    files = ((code.co_qualname, Path(code.co_filename)) for code in seen)
    room = ROOT / "bridge"
    return [
        (name, str(file.relative_to(room))) for name, file in files if file.is_relative_to(room)
    ]


def test_the_picture_of_a_call_is_the_way_that_it_takes() -> None:
    title, picture = re.findall(
        r"`bridge\.run_with_cache\((.+?)\)`.*?```\n(.+?)```", PAGE, re.DOTALL
    )[0]
    prompt, names_filter = re.findall(r'"(.+?)"', title)
    drawn = re.findall(r"^[| v]*([\w.]+) +([\w/]+\.py)\b", picture, re.MULTILINE)
    assert len(drawn) > 25
    way = entered(prompt, names_filter)
    at = -1
    for name, file in drawn:
        # A class stands for what is done first with its objects.
        found = [
            i
            for i, (code, where) in enumerate(way)
            if where == file and f"{code}.".startswith(f"{name}.")
        ]
        assert found, f"{name} in {file} is not on the way"
        later = [i for i in found if i > at]
        assert later, f"{name} in {file} comes before what is drawn above it"
        at = min(later)
