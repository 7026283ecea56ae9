"""Draw a made-up chest X-ray in which every finding can be seen and its side matters.

Body coordinates: x from -1 to 1, where the patient's left is on the image's right; y downwards; 0 in the middle.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from old.sample_data_utils import logistic, smooth_noise
from tasks.mimic_cxr.sample_findings import SIDES, ZONES, Finding


class Box(NamedTuple):
    """Where a finding lies: the middle of its box and half of its sides."""

    x: float
    y: float
    half_width: float
    half_height: float


class Lung(NamedTuple):
    """One lung of an image.

    sign: which way x runs from the middle to this lung. air: 0 to 1. rim: 1 in the lung's middle and 0 at its edge.
    """

    sign: int
    air: np.ndarray
    rim: np.ndarray


class Stance(NamedTuple):
    """How the patient stands before the detector, in an image of so many rows and columns.

    unit: pixels of one unit of the body's coordinates. turn: radians. shift_x, shift_y: from the middle, in units.
    """

    rows: int
    columns: int
    unit: float
    turn: float
    shift_x: float
    shift_y: float


@dataclass
class Canvas:
    """An X-ray under construction: each pixel's place in the body, noise with small and with large features, grey."""

    stance: Stance
    x: np.ndarray
    y: np.ndarray
    fine: np.ndarray
    cloud: np.ndarray
    grey: np.ndarray

    def paint(self, mask: np.ndarray, level: float) -> None:
        """Blend a level of grey into the image where the mask is."""
        self.grey = self.grey + mask * (level - self.grey)

    def ellipse(self, box: Box, width: float = 0.02) -> np.ndarray:
        """The mask of the ellipse in a box, with an edge of this width."""
        x = self.x - box.x
        y = self.y - box.y
        across = x / box.half_width
        along = y / box.half_height
        distance = np.sqrt(across**2 + along**2)
        shorter = min(box.half_width, box.half_height)
        inside = (1 - distance) * shorter
        return soft(inside, width)

    def line(self, start: tuple, end: tuple, thickness: float) -> np.ndarray:
        """The mask of a line from start to end."""
        start_x, start_y = start
        end_x, end_y = end
        along_x = end_x - start_x
        along_y = end_y - start_y
        x = self.x - start_x
        y = self.y - start_y

        # The nearest point of the line, as a share of its length.
        nearest = x * along_x + y * along_y
        nearest = nearest / (along_x**2 + along_y**2)
        nearest = np.clip(nearest, 0, 1)
        x = x - nearest * along_x
        y = y - nearest * along_y
        distance = np.hypot(x, y)
        return soft(thickness - distance, 0.01)


def soft(field: np.ndarray, width: float = 0.02) -> np.ndarray:
    """The mask of where a field is above 0, with an edge of this width."""
    return logistic(field / width)


def chest_image(rng: Generator, size: int, findings: list[Finding]) -> tuple[np.ndarray, list]:
    """Draw a frontal image as (rows, columns) uint8, and the pixel box of each finding."""
    canvas = new_canvas(rng, size)
    lungs = paint_chest(canvas)
    levels = {}
    for finding in findings:
        if not finding.side:
            levels[finding.entity] = finding.level
    if "edema" in levels:
        paint_edema(canvas, lungs, levels["edema"])

    # What lies under the heart, the middle, and what lies over it.
    under = [paint_under_heart(canvas, lungs, finding) for finding in findings]
    middle = paint_middle(rng, canvas, levels)
    over = [paint_over_heart(rng, canvas, lungs, finding) for finding in findings]

    pixels = []
    for i, finding in enumerate(findings):
        box = under[i] or over[i] or middle[finding.entity]
        edges = pixel_box(canvas.stance, box)
        pixels.append(edges)
    return expose(rng, canvas), pixels


def lateral_image(rng: Generator, size: int) -> np.ndarray:
    """Draw an image from the side as (rows, columns) uint8; it shows none of the findings."""
    canvas = new_canvas(rng, size)
    x = canvas.x
    y = canvas.y
    cloud = 0.05 * canvas.cloud
    box = Box(0.0, 0.1, 0.72, 1.15)
    body = canvas.ellipse(box)
    canvas.paint(body, 0.5 + cloud)

    # The lungs, with their vessels as stripes.
    box = Box(0.0, -0.1, 0.5, 0.68)
    lungs = canvas.ellipse(box)
    stripes = 0.03 * np.sin(16 * y + 5 * x)
    level = 0.24 + cloud + stripes
    canvas.paint(lungs, level)

    # The diaphragm.
    above = y - 0.42 + 0.2 * x
    diaphragm = 0.8 * soft(above)
    canvas.paint(diaphragm, 0.72)

    # The heart.
    box = Box(-0.28, 0.2, 0.3, 0.26)
    heart = 0.7 * canvas.ellipse(box, 0.06)
    canvas.paint(heart, 0.7)

    # The spine with its vertebrae.
    distance = abs(x - 0.5)
    spine = 0.6 * soft(0.1 - distance)
    vertebrae = 0.06 * np.sin(24 * y)
    level = 0.75 + vertebrae
    canvas.paint(spine, level)
    return expose(rng, canvas)


def new_canvas(rng: Generator, size: int) -> Canvas:
    """Draw how the patient stands, and the noise of the image."""
    stance = draw_stance(rng, size)
    rows = stance.rows
    columns = stance.columns
    fine = smooth_noise(rng, size, size // 6)
    cloud = smooth_noise(rng, size, 9)
    cloud = cloud[:rows, :columns]

    # From pixels to the body's coordinates.
    grid = np.mgrid[0:rows, 0:columns]
    y, x = grid.astype("float32")
    x = x - columns / 2
    y = y - rows / 2
    x = x / stance.unit - stance.shift_x
    y = y / stance.unit - stance.shift_y

    # The patient stands a little aslant.
    sine = math.sin(stance.turn)
    cosine = math.cos(stance.turn)
    return Canvas(
        stance=stance,
        x=x * cosine + y * sine,
        y=y * cosine - x * sine,
        fine=fine[:rows, :columns],
        cloud=cloud,
        grey=0.05 + 0.02 * cloud,
    )


def draw_stance(rng: Generator, size: int) -> Stance:
    """Draw the format of an image, and how the patient stands; size is the longer side."""
    uniform = rng.uniform
    rows = size
    columns = size * uniform(0.84, 1.0)
    columns = round(columns)
    if rng.random() < 0.2:
        rows = columns
        columns = size

    # The body fills most of the image.
    scale = uniform(0.92, 1.04)
    narrower = min(rows, columns / 0.86)
    return Stance(
        rows=rows,
        columns=columns,
        unit=narrower / 2 * scale,
        turn=uniform(-0.05, 0.05),
        shift_x=uniform(-0.04, 0.04),
        shift_y=uniform(-0.04, 0.04),
    )


def expose(rng: Generator, canvas: Canvas) -> np.ndarray:
    """Draw grain, contrast and exposure, and return the image as uint8."""
    uniform = rng.uniform
    shape = canvas.grey.shape
    grain = rng.standard_normal(shape, dtype=np.float32)
    grey = canvas.grey + 0.02 * canvas.fine
    grey = grey + 0.015 * grain
    grey = np.clip(grey, 0, 1.05)

    grey = grey ** uniform(0.9, 1.1)
    grey = grey * uniform(0.86, 0.98)
    grey = grey + uniform(0, 0.03)
    grey = np.clip(grey, 0, 1)
    grey = 255 * grey
    return grey.astype(np.uint8)


def pixel_box(stance: Stance, box: Box) -> list[float]:
    """The left, upper, right and lower edge of a box, in pixels."""
    unit = stance.unit
    middle_x = stance.columns / 2
    middle_y = stance.rows / 2
    x = middle_x + (box.x + stance.shift_x) * unit
    y = middle_y + (box.y + stance.shift_y) * unit
    width = box.half_width * unit
    height = box.half_height * unit

    # A box ends with the image.
    last_column = stance.columns - 1.0
    last_row = stance.rows - 1.0
    left = max(0.0, x - width)
    upper = max(0.0, y - height)
    right = min(last_column, x + width)
    lower = min(last_row, y + height)
    edges = (left, upper, right, lower)
    return [round(float(edge), 1) for edge in edges]


# --- the chest --------------------------------------------------------------------------------------------------------


def paint_chest(canvas: Canvas) -> dict[str, Lung]:
    """Paint the body, the lungs and the ribs; returns the lungs."""
    x = canvas.x
    y = canvas.y
    cloud = 0.05 * canvas.cloud
    waist = 0.05 * np.cos(3 * y)
    trunk = soft(0.86 - waist - abs(x), 0.03)
    below = y + 0.93 - 0.35 * x**2
    shoulders = soft(below, 0.03)
    canvas.paint(trunk * shoulders, 0.52 + cloud)

    # The chest wall.
    outside = abs(x) - 0.72
    wall = 0.35 * soft(outside, 0.05)
    canvas.paint(wall, 0.7)
    lungs = {}
    for side in SIDES:
        lungs[side] = paint_lung(canvas, side)

    # The ribs fall off to the sides.
    from_middle = abs(x)
    bend = 0.55 * (from_middle - 0.3) ** 2
    course = y - bend + 0.12 * from_middle
    wave = np.sin(11 * course) / 0.45
    ribs = 0.12 * np.exp(-(wave**2))
    ribs = ribs * soft(0.78 - from_middle)
    ribs = ribs * soft(0.5 - y, 0.05)
    ribs = ribs * soft(y + 0.8, 0.05)
    canvas.grey = canvas.grey + ribs
    return lungs


def paint_lung(canvas: Canvas, side: str) -> Lung:
    """Paint one lung with its vessels, its hilum and the clavicle above it."""
    sign = 1 if side == "left" else -1
    x = sign * canvas.x
    y = canvas.y
    cloud = canvas.cloud
    across = (x - 0.4) / 0.3
    along = (y + 0.08) / 0.66
    along = abs(along) ** 2.6
    rim = 1 - across**2 - along

    # The right dome of the diaphragm is the higher one.
    top = 0.47 if side == "left" else 0.42
    dome = top - 0.1 * np.cos(1.4 * across)
    above = soft(dome - y)
    air = soft(rim, 0.05) * above
    level = 0.24 + 0.04 * cloud
    canvas.paint(air, level)

    # The vessels run out from the hilum.
    angle = np.arctan2(y, x - 0.12)
    branches = np.sin(13 * angle + 7 * cloud)
    distance = np.hypot(x - 0.2, y + 0.02)
    vessels = np.exp(-4 * distance)
    vessels = vessels * (0.5 + 0.5 * branches)
    canvas.grey = canvas.grey + 0.16 * air * vessels

    # The hilum.
    middle = sign * 0.2
    box = Box(middle, -0.03, 0.09, 0.13)
    hilum = 0.5 * canvas.ellipse(box, 0.04)
    canvas.paint(hilum, 0.62)

    # The clavicle.
    start = sign * 0.06, -0.6
    end = sign * 0.72, -0.74
    clavicle = 0.55 * canvas.line(start, end, 0.03)
    canvas.paint(clavicle, 0.75)
    return Lung(sign, air, rim)


def paint_middle(rng: Generator, canvas: Canvas, levels: dict[str, int]) -> dict[str, Box]:
    """Paint what lies between and below the lungs, and return the boxes of the central findings."""
    width = 0.15
    if "enlarged cardiomediastinum" in levels:
        width = 0.3
    width = width * rng.uniform(0.95, 1.05)
    paint_mediastinum(canvas, width)

    # The heart grows with the level of cardiomegaly.
    level = levels.get("cardiomegaly", 0)
    heart_size = (1.0, 1.32, 1.6, 1.9)[level]
    heart_size = heart_size * rng.uniform(0.96, 1.04)
    paint_heart(canvas, heart_size)
    paint_spine_and_abdomen(canvas)
    return {
        "cardiomegaly": Box(0.1, 0.24, 0.27 * heart_size, 0.25),
        "enlarged cardiomediastinum": Box(0.0, -0.3, width, 0.4),
        "edema": Box(0.0, -0.1, 0.7, 0.6),
    }


def paint_mediastinum(canvas: Canvas, width: float) -> None:
    """Paint the mediastinum and the aortic knob."""
    distance = abs(canvas.x - 0.02)
    below = canvas.y + 0.72
    mediastinum = 0.8 * soft(width - distance, 0.03)
    mediastinum = mediastinum * soft(below, 0.05)
    canvas.paint(mediastinum, 0.68)

    # The aortic knob.
    box = Box(0.13, -0.3, 0.1, 0.1)
    knob = 0.7 * canvas.ellipse(box, 0.03)
    canvas.paint(knob, 0.74)


def paint_heart(canvas: Canvas, size: float) -> None:
    """Paint the heart, which lies aslant and grows more in width than in height."""
    half_width = 0.27 * size
    half_height = 0.25 * (0.6 + 0.4 * size)
    y = canvas.y
    x = canvas.x - 0.1 + 0.3 * (y - 0.2)
    across = x / half_width
    along = (y - 0.24) / half_height
    distance = np.sqrt(across**2 + along**2)
    heart = 0.95 * soft(1 - distance, 0.07)
    level = 0.76 + 0.02 * canvas.cloud
    canvas.paint(heart, level)


def paint_spine_and_abdomen(canvas: Canvas) -> None:
    """Paint the spine, the trachea before it, and the abdomen with air in the stomach."""
    y = canvas.y
    from_middle = abs(canvas.x)
    spine = 0.55 * soft(0.085 - from_middle)
    vertebrae = 0.06 * np.sin(30 * y)
    level = 0.8 + vertebrae
    canvas.paint(spine, level)

    # The trachea.
    trachea = 0.5 * soft(0.045 - from_middle)
    trachea = trachea * soft(-0.32 - y, 0.04)
    canvas.paint(trachea, 0.3)

    # The abdomen and the stomach.
    abdomen = 0.6 * soft(y - 0.5, 0.04)
    abdomen = abdomen * soft(0.84 - from_middle)
    canvas.paint(abdomen, 0.74)
    box = Box(0.32, 0.56, 0.12, 0.07)
    stomach = 0.5 * canvas.ellipse(box, 0.03)
    canvas.paint(stomach, 0.3)


# --- the findings -----------------------------------------------------------------------------------------------------


def paint_edema(canvas: Canvas, lungs: dict[str, Lung], level: int) -> None:
    """Paint haze over both lungs, the most of it around the hila."""
    left = lungs["left"]
    right = lungs["right"]
    both = left.air + right.air
    haze = 0.32 + 0.1 * canvas.cloud
    strength = (0.35, 0.7, 1.05)[level - 1]
    haze = strength * haze

    # The hila lie at 0.25 on both sides.
    from_hilum = abs(canvas.x) - 0.25
    around_hilum = np.exp(-4 * from_hilum**2)
    share = 0.75 + 0.25 * around_hilum
    canvas.grey = canvas.grey + both * haze * share


def paint_under_heart(canvas: Canvas, lungs: dict[str, Lung], finding: Finding) -> Box | None:
    """Paint a finding that lies under the heart. Returns None for other findings."""
    if finding.entity == "pleural effusion":
        lung = lungs[finding.side]
        return paint_effusion(canvas, lung, finding.level)
    if finding.entity == "pneumothorax":
        lung = lungs[finding.side]
        return paint_pneumothorax(canvas, lung, finding.level)
    return None


def paint_effusion(canvas: Canvas, lung: Lung, level: int) -> Box:
    """Paint fluid at the bottom of the lung, which climbs at its outer side."""
    y = canvas.y
    height = (0.18, 0.4, 0.66)[level - 1]
    outwards = lung.sign * canvas.x - 0.3
    outwards = outwards.clip(0)
    climb = 0.2 * outwards**1.5 / 0.3
    surface = 0.42 - height - climb

    fluid = 0.97 * soft(lung.rim + 0.05, 0.05)
    fluid = fluid * soft(y - surface)
    fluid = fluid * soft(0.46 - y, 0.05)
    cloud = 0.03 * canvas.cloud
    canvas.paint(fluid, 0.8 + cloud)

    half_height = height / 2
    x = 0.4 * lung.sign
    y = 0.47 - half_height
    return Box(x, y, 0.3, half_height)


def paint_pneumothorax(canvas: Canvas, lung: Lung, level: int) -> Box:
    """Paint a lung that has shrunk: black around it, and the visceral pleura as its rim."""
    shrink = (0.86, 0.69, 0.52)[level - 1]
    x = lung.sign * canvas.x - 0.12
    y = canvas.y - 0.16
    across = x / (0.57 * shrink)
    along = y / (0.92 * shrink)
    along = abs(along) ** 2.4
    inner = 1 - across**2 - along

    # The air around it.
    outside = soft(-inner, 0.04)
    canvas.paint(lung.air * outside, 0.03)

    # The pleura.
    distance = inner / 0.05
    near = np.exp(-(distance**2))
    pleura = 0.7 * lung.air * near
    canvas.paint(pleura, 0.6)
    x = 0.45 * lung.sign
    return Box(x, -0.2, 0.28, 0.5)


def paint_over_heart(rng: Generator, canvas: Canvas, lungs: dict[str, Lung], finding: Finding) -> Box | None:
    """Paint a finding that lies over the heart. Returns None for other findings."""
    uniform = rng.uniform
    shift_x = uniform(-0.04, 0.04)
    shift_y = uniform(-0.03, 0.03)
    if not finding.side:
        return None

    # Patches of the lung lie somewhere in the zone of their region.
    entity = finding.entity
    level = finding.level
    lung = lungs[finding.side]
    sign = lung.sign
    if entity in ("consolidation", "lung lesion"):
        zone = finding.region.removeprefix(f"{finding.side} ")
        x = 0.42 * sign + shift_x
        y = shift_y + ZONES[zone]
        if entity == "consolidation":
            return paint_consolidation(canvas, lung, level, x, y)
        return paint_nodule(canvas, level, x, y)

    # The others have their own place.
    if entity == "atelectasis":
        return paint_atelectasis(canvas, lung)
    if entity == "pleural other":
        return paint_thick_pleura(canvas, lung, level)
    if entity == "fracture":
        y = uniform(-0.08, 0.08)
        return paint_fracture(canvas, 0.75 * sign, y)
    if entity == "support devices":
        x = 0.6 * sign + uniform(-0.03, 0.03)
        y = -0.56 + uniform(-0.03, 0.03)
        return paint_pacemaker(canvas, sign, x, y)
    return None


def paint_consolidation(canvas: Canvas, lung: Lung, level: int, x: float, y: float) -> Box:
    """Paint a cloudy patch of the lung."""
    radius = (0.17, 0.195, 0.22)[level - 1]
    box = Box(x, y, 1.2 * radius, radius)
    patch = lung.air * canvas.ellipse(box, 0.04)
    cloud = 0.2 * canvas.cloud
    patch = patch * (0.9 + cloud)
    canvas.paint(patch, 0.84)
    return box


def paint_nodule(canvas: Canvas, level: int, x: float, y: float) -> Box:
    """Paint a round nodule."""
    radius = (0.09, 0.105, 0.12)[level - 1]
    box = Box(x, y, radius, radius)
    nodule = canvas.ellipse(box)
    canvas.paint(nodule, 1.0)
    return box


def paint_atelectasis(canvas: Canvas, lung: Lung) -> Box:
    """Paint two plates at the base of the lung."""
    sign = lung.sign
    for shift in (-0.06, 0.08):
        y = 0.2 + shift
        start = 0.2 * sign, y - 0.05
        end = 0.64 * sign, y + 0.04
        plate = canvas.line(start, end, 0.03)
        plate = lung.air * plate
        canvas.paint(plate, 0.85)
    x = 0.42 * sign
    return Box(x, 0.22, 0.25, 0.13)


def paint_thick_pleura(canvas: Canvas, lung: Lung, level: int) -> Box:
    """Paint a cap at the apex of the lung."""
    waves = 0.06 * np.sin(14 * canvas.x)
    edge = -0.46 - 0.03 * (level - 1)
    above = edge + waves - canvas.y
    cap = 0.95 * lung.air * soft(above)
    canvas.paint(cap, 0.82)
    x = 0.4 * lung.sign
    return Box(x, -0.62, 0.24, 0.14)


def paint_fracture(canvas: Canvas, x: float, y: float) -> Box:
    """Paint a rib in two pieces that do not meet."""
    box = Box(x, y, 0.13, 0.13)
    gap = canvas.ellipse(box)
    canvas.paint(gap, 0.1)

    # The inner piece lies higher.
    start = x - 0.14, y - 0.08
    end = x + 0.01, y - 0.04
    piece = canvas.line(start, end, 0.045)
    canvas.paint(piece, 1.0)

    # The outer piece.
    start = x - 0.02, y + 0.08
    end = x + 0.12, y + 0.05
    piece = canvas.line(start, end, 0.045)
    canvas.paint(piece, 1.0)
    return Box(x, y, 0.15, 0.13)


def paint_pacemaker(canvas: Canvas, sign: int, x: float, y: float) -> Box:
    """Paint a pacemaker under the skin, and its lead down to the heart."""
    from_x = abs(canvas.x - x)
    from_y = abs(canvas.y - y)
    distance = np.maximum(from_x, from_y)
    square = soft(0.1 - distance, 0.01)
    canvas.paint(square, 1.05)

    # The lead has a bend.
    start = x - sign * 0.08, y
    bend = sign * 0.1, -0.35
    end = 0.05, 0.25
    lead = canvas.line(start, bend, 0.013)
    canvas.paint(lead, 0.98)
    lead = canvas.line(bend, end, 0.013)
    canvas.paint(lead, 0.98)
    return Box(x, y, 0.1, 0.1)
