"""The views of guide 3's X-rays as the config and a checkpoint describe them: where source and detector stand.

Light on purpose (no torch): the command line is parsed with it. Axes as in projector.py: x runs to the patient's
right, y to the front, z to the head, in mm from the isocentre, which is the middle of the CT's field of view.

Angles. The rays of a view at angle a run along (-sin a, cos a, 0), from the source to the detector: seen from above
the head, source and detector are turned anticlockwise by a. At 0 the rays enter at the back and leave at the front
(pa), at 90 they enter at the patient's right and leave at the left (a left lateral), at 45 they leave at the left
front. An image shows what one sees from the detector, facing the source, the head up: its columns run along
(-cos a, -sin a, 0), its rows against z.
"""

import json
import math
import re
from argparse import ArgumentTypeError
from difflib import get_close_matches
from typing import NamedTuple

from old.cli_utils import json_value

# What renders cone beams, and parallel ones at other angles; see requirements-cone.txt.
LIBRARY = "nanodrr==0.1.7"
MOST_VIEWS = 4
# What file names of pa and lat may end with too (files.py), or with any view; another view may not be called so.
RESERVED = ("drr", "frontal", "lateral")
# The angles at which parallel rays run along an axis of (X, Y, Z).
RAY_AXES = {0.0: 1, 90.0: 0}


class View(NamedTuple):
    """One view. Angle in degrees; the rest describes a cone beam, and is None where the rays are parallel.

    source_distance, detector_distance: mm from the isocentre. rows, columns: pixels of the detector. spacing: mm per
    pixel on it. Parallel images span the shadow of the field of view from edge to edge.
    """

    name: str
    angle: float
    source_distance: float | None = None
    detector_distance: float | None = None
    rows: int | None = None
    columns: int | None = None
    spacing: float | None = None

    @property
    def parallel(self) -> bool:
        """Whether the rays are parallel, and not a cone."""
        return self.source_distance is None

    @property
    def ray_axis(self) -> int | None:
        """The axis of (X, Y, Z) along which all rays run; None where they are oblique or a cone."""
        return RAY_AXES.get(self.angle % 360) if self.parallel else None

    @property
    def turn(self) -> tuple[float, float]:
        """(cos, sin) of the angle; to 15 digits, so that a quarter turn has a plain 0 and 1."""
        radians = math.radians(self.angle)
        return round(math.cos(radians), 15), round(math.sin(radians), 15)


PA = View("pa", 0.0)
LAT = View("lat", 90.0)
STANDARD = {"pa": PA, "lat": LAT}
# The keys of a cone beam, and the kind, the least and the most of each.
CONE_KEYS = {
    "source_distance": (float, 1, 1e6),
    "detector_distance": (float, 0, 1e6),
    "rows": (int, 8, 8192),
    "columns": (int, 8, 8192),
    "spacing": (float, 0.01, 100),
}


def as_view(view: str | View) -> View:
    """The view, where "pa" and "lat" may stand for the parallel ones."""
    return STANDARD[view] if isinstance(view, str) else view


def views_of(settings: list[dict]) -> tuple[View, ...]:
    """The views of the flag's value, or of a checkpoint's."""
    return tuple(View(**entry) for entry in settings)


def needs_library(view: View) -> bool:
    """Whether LIBRARY casts the rays of a view; along an axis the voxels are summed."""
    return view.ray_axis is None


def wrong_extent(view: View, extent: tuple[float, float, float]) -> str:
    """What is wrong with a view of a field of view (X, Y, Z) in mm, or empty: source and detector must lie outside."""
    if view.parallel:
        return ""
    cosine, sine = view.turn
    depth = abs(sine) * extent[0] + abs(cosine) * extent[1]
    for part, distance in (("source", view.source_distance), ("detector", view.detector_distance)):
        if distance <= depth / 2:
            where = f"{distance:g} mm from the isocentre"
            return f"the {part} of view {view.name!r} lies {where}, inside a field of view {depth:.0f} mm deep"
    return ""


# --- --views ----------------------------------------------------------------------------------------------------------


def view_list(text: str) -> list[dict]:
    """argparse type of --views: JSON list of 1 to 4 views, checked; each as a dict of all fields of View.

    Dicts, as they go into args.yaml and checkpoints; views_of makes views of them. "pa" and "lat" are short for the
    parallel ones.
    """
    entries = json_value(text, "a list of views")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MOST_VIEWS:
        raise ArgumentTypeError(f"must be a list of 1 to {MOST_VIEWS} views, each with name, angle ...")

    checked: list[dict] = []
    for k, entry in enumerate(entries):
        entry = {"name": entry} if isinstance(entry, str) else entry
        names = [view["name"] for view in checked]
        reason = wrong_keys(entry) or wrong_name(entry, names) or wrong_angle(entry) or wrong_cone(entry)
        if reason:
            raise ArgumentTypeError(f"view {k + 1}: {reason}")
        checked.append(with_angle(entry)._asdict())
    return checked


def with_angle(entry: dict) -> View:
    """The view of an entry, which may leave out the angle of pa and lat."""
    standard = STANDARD.get(entry["name"])
    angle = entry.get("angle", standard.angle if standard else None)
    return View(**entry | {"angle": float(angle)})


def wrong_keys(entry) -> str:
    """What is wrong with the keys of a view, or empty."""
    if not isinstance(entry, dict):
        return f"{entry!r} must be a view such as {json.dumps({'name': 'obl45', 'angle': 45})}"
    for key in entry:
        if key not in View._fields:
            near = get_close_matches(str(key), View._fields, n=1)
            advice = f"did you mean {near[0]!r}" if near else f"it has {', '.join(View._fields)}"
            return f"unknown key {key!r}, {advice}"
    return ""


def wrong_name(entry: dict, taken: list[str]) -> str:
    """What is wrong with the name of a view, with which its file names end, or empty."""
    name = entry.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        return f"name {name!r} must be of small letters, digits and -, such as 'obl45'"
    if name in RESERVED:
        return f"the name {name!r} ends other views' files; take another, such as 'pa' or 'lat'"
    if name in taken:
        return f"the name {name!r} is taken"
    return ""


def is_number(value, kind: type, least: float, most: float) -> bool:
    """Whether a value of JSON is a number of a kind (int or float) and within bounds."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    return least <= value <= most


def wrong_angle(entry: dict) -> str:
    """What is wrong with the angle of a view, or empty."""
    if "angle" not in entry and entry["name"] in STANDARD:
        return ""
    if "angle" not in entry:
        return f"{entry['name']!r} has no angle, in degrees (pa and lat alone go without)"
    angle = entry["angle"]
    if is_number(angle, float, -360, 360):
        return ""
    return f"angle {angle!r} must be a number of degrees from -360 to 360 (0 is pa, 90 is lat)"


def wrong_cone(entry: dict) -> str:
    """What is wrong with source and detector of a view, or empty."""
    given = [key for key in CONE_KEYS if entry.get(key) is not None]
    if not given:
        return ""
    for key, (kind, least, most) in CONE_KEYS.items():
        value = entry.get(key)
        if value is None and key == "source_distance":
            return f"{given[0]} is of a cone beam; give source_distance too, or leave it out for parallel rays"
        if value is None:
            return f"a cone beam needs {key} too, beside {', '.join(given)}"
        if not is_number(value, kind, least, most):
            noun = "whole number" if kind is int else "number"
            unit = "" if kind is int else " mm"
            return f"{key} {value!r} must be a {noun} from {least:g} to {most:g}{unit}"
    return ""


DEFAULT_VIEWS = [PA._asdict(), LAT._asdict()]
