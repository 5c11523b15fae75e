"""The scales are centred at zero and can be read with every common kind of colour vision, on light
and dark ground.
"""

import itertools
import math
import re

import pytest
import torch

from bridge import pictures
from bridge.pictures import style

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color
# Vision Deficiency", severity 1, on linear RGB.
VISION = {
    "typical": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def luminance(rgb):
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def contrast(one, other):
    bright, dim = sorted((luminance(linear(one)), luminance(linear(other))), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def seen(colour, vision):
    """CIELAB of a colour as somebody sees it."""
    rgb = linear(colour)
    rgb = [
        min(1.0, max(0.0, sum(w * c for w, c in zip(row, rgb, strict=True))))
        for row in VISION[vision]
    ]
    x = (0.4124 * rgb[0] + 0.3576 * rgb[1] + 0.1805 * rgb[2]) / 0.9505
    z = (0.0193 * rgb[0] + 0.1192 * rgb[1] + 0.9505 * rgb[2]) / 1.089
    fx, fy, fz = (
        t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116
        for t in (x, luminance(rgb), z)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_negative_positive_and_zero_look_different(vision, ground):
    colours = [seen(pair[ground], vision) for pair in style.DIVERGING]
    for i, j in itertools.combinations(range(5), 2):
        assert math.dist(colours[i], colours[j]) > 20, (i, j)
    assert math.dist(colours[0], colours[4]) > 55


@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_more_is_further_from_the_ground(ground):
    def away(pair):
        return abs(
            seen(pair[ground], "typical")[0] - seen(style.PALETTE["ground"][ground], "typical")[0]
        )

    for scale in (style.SEQUENTIAL, style.DIVERGING[2:], style.DIVERGING[2::-1]):
        steps = [away(pair) for pair in scale]
        assert steps == sorted(steps) and steps[-1] > 40
    assert (
        abs(away(style.DIVERGING[0]) - away(style.DIVERGING[4])) < 8
    )  # either sign weighs the same


def cells_and_words(picture, dark):
    """The colours of cells, and of the words in them, as they are drawn."""
    svg = picture.svg(dark)
    cells = re.findall(r'aria-roledescription="rect mark"[^>]*fill="([^"]*)"', svg)
    return [hexadecimal(cell) for cell in cells], re.findall(
        r'aria-roledescription="text mark"[^>]*fill="(#\w+)"', svg
    )


def hexadecimal(colour):
    parts = [int(part) for part in re.findall(r"\d+", colour)]
    return f"#{bytes(parts).hex()}" if colour.startswith("rgb") else colour


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_on_every_cell(dark):
    assert contrast(style.PALETTE["ink"][dark], style.PALETTE["ground"][dark]) > 7
    steps = torch.linspace(-1, 1, 401)
    drawn = [
        pictures.heat_map(torch.cat([part, torch.ones(1)])[:, None]) for part in steps.split(39)
    ]
    drawn += [
        pictures.tokens(torch.cat([part.abs(), torch.ones(1)]), ["w"] * (len(part) + 1))
        for part in steps.split(39)
    ]
    least = 21.0
    for picture in drawn:
        cells, words = cells_and_words(picture, dark)
        assert len(words) == len(cells) > 1
        least = min(least, *(contrast(cell, ink) for cell, ink in zip(cells, words, strict=True)))
    assert least >= 4.5, least


def colour_domain(picture):
    return picture.spec()["layer"][0]["encoding"]["color"]["scale"]["domain"]


def test_zero_is_in_the_middle_if_a_value_is_negative():
    for values in (torch.tensor([[-9.0, 0.5]]), torch.tensor([[-1.0, 7.0]])):
        domain = colour_domain(pictures.heads(values))
        assert domain == sorted(domain) and domain[2] == 0 and domain[0] == -domain[4] < 0
        assert domain[4] >= values.abs().max()


def test_the_scale_begins_at_zero_if_no_value_is_negative():
    assert colour_domain(pictures.heads(torch.tensor([[1.0, 7.0]]))) == [0, 3.5, 7]
    assert colour_domain(pictures.heads(torch.zeros(1, 2))) == [0, 0.5, 1]
