"""The HDF5 file of Darkroom's learning histories: it is found, read, and every value of it is checked.

    history.hdf5 /0 ... /80   states, next_states (T, streams, 2) int   actions (T, streams) int
                              rewards (T, streams) number               dones (T, streams) bool, every 20th True

Group g has the histories of goal g: what a learner did there, from its first step on.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from old.cli_utils import InputError
from tasks.compressed_ad.darkroom import ACTIONS, CELLS, GRID, HORIZON, NEXT, START, to_cells

FIELDS = ("states", "next_states", "actions", "rewards", "dones")

# The fields of whole numbers, and what these are below.
LIMITS = {"states": GRID, "next_states": GRID, "actions": ACTIONS}

# A path that leads through more links than this leads in a circle.
MOST_LINKS = 16

# No compression of HDF5 reaches this factor, so an array beyond it, and beyond so many bytes, is not believed.
MOST_COMPRESSION = 2000
BELIEVED_BYTES = 2**30


class BadLink(Exception):
    """Why a link of an HDF5 file is not followed."""


class BadHistory(Exception):
    """What is wrong with a goal's histories, and what to do about it."""

    def __init__(self, reason: str, advice: str = "correct or make the histories anew"):
        super().__init__(f"{reason}; {advice}")


@contextlib.contextmanager
def name_goal(path: Path, goal: int) -> Iterator[None]:
    """Turn a BadHistory into an InputError that names the file and the goal's group."""
    try:
        yield
    except BadHistory as error:
        raise InputError(f"{path}: group '{goal}': {error}") from None


# --- reading ----------------------------------------------------------------------------------------------------------


def find_histories(path: str) -> Path:
    """The HDF5 file that --data means. Raises InputError for a folder that does not hold one of them."""
    folder = Path(path)
    if not folder.is_dir():
        return folder
    patterns = ("*.hdf5", "*.h5", "datasets/*.hdf5", "datasets/*.h5")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if len(files) != 1:
        reason = f"holds {len(files)} HDF5 files" if files else "holds no .hdf5 or .h5 file"
        raise InputError(f"{path}: {reason}, also not in datasets/; name the file with --data")
    return files[0]


def read_goals(path: Path, in_memory: bool) -> list[dict[str, np.ndarray]]:
    """The arrays of each goal by field, in memory or mapped. Raises InputError for what cannot be read."""
    import h5py

    if not path.is_file():
        raise InputError(f"{path}: no such file; {advise_without_file(path.parent)}")
    goals = []
    try:
        with h5py.File(path) as file:
            for goal in range(CELLS):
                with name_goal(path, goal):
                    goals.append(read_goal(file, goal, in_memory))
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        # h5py raises all of these for a file that is damaged
        kind = "truncated HDF5 file" if "truncated" in str(error) else "not a readable HDF5 file"
        raise InputError(f"{path}: {kind} of {path.stat().st_size} bytes; get or make it anew") from None
    return goals


def advise_without_file(folder: Path) -> str:
    """What to do where the file is not in its folder."""
    others = sorted(path.name for path in folder.glob("*.hdf5"))
    if others:
        return f"beside it lies {others[0]}; give that with --data"
    return "make histories with `python -m tools.sample_data compressed_ad FOLDER`, then give --data FOLDER"


def read_goal(file, goal: int, in_memory: bool) -> dict[str, np.ndarray]:
    """A goal's arrays by field, of an open HDF5 file. Raises BadHistory."""
    if find_object(file, goal) is None:
        raise BadHistory(f"is missing; there must be '0' to '{CELLS - 1}', one for each goal")
    data_sets = {name: find_object(file, goal, name) for name in FIELDS}
    for name, data in data_sets.items():
        if data is None:
            raise BadHistory(f"has no {name!r}")
    return {name: read_array(name, data, in_memory) for name, data in data_sets.items()}


def find_object(file, goal: int, name: str = ""):
    """A goal's group, or its data set `name`; None where there is none. Raises BadHistory for any other object."""
    import h5py

    subject = f"{name} " if name else ""
    try:
        found = follow_path(file, f"{goal}/{name}")
    except BadLink as error:
        raise BadHistory(f"{subject}is {error}") from None
    kinds = {h5py.Group: "a group", h5py.Dataset: "a data set", h5py.Datatype: "a named type"}
    wanted = h5py.Dataset if name else h5py.Group
    if found is None or isinstance(found, wanted):
        return found
    kind = next(words for kind, words in kinds.items() if isinstance(found, kind))
    raise BadHistory(f"{subject}is {kind}, not {kinds[wanted]}")


def follow_path(file, path: str):
    """The group, data set or type at a path of an open HDF5 file; None where there is none.

    Raises BadLink for a link that leads out of the file or in a circle: another file is never opened.
    """
    import h5py

    here = file
    names = path.split("/")
    followed = 0
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        if not isinstance(here, h5py.Group) or not here.id.links.exists(name.encode()):
            return None
        kind = here.id.links.get_info(name.encode()).type
        if kind == h5py.h5l.TYPE_HARD:
            here = here[name]
            continue
        if kind != h5py.h5l.TYPE_SOFT:
            raise BadLink("a link into another file, which is not followed")

        # a soft link is a path, from the root or from here on
        followed += 1
        if followed > MOST_LINKS:
            raise BadLink("a link that leads in a circle")
        target = here.id.links.get_val(name.encode()).decode(errors="replace")
        if target.startswith("/"):
            here = file
        names = target.split("/") + names
    return here


def read_array(name: str, data, in_memory: bool) -> np.ndarray:
    """A data set's values, in memory or mapped. Raises BadHistory for one whose values are not in this file."""
    if data.shape is None:
        raise BadHistory(f"{name} is an empty (null) data set")
    if data.is_virtual or data.external:
        raise BadHistory(f"{name} keeps its values in another file, which is not read")
    if data.dtype.kind not in "biuf":
        raise BadHistory(f"{name} holds {data.dtype}, not numbers")

    # a size that cannot be true is told before memory is taken for it
    declared = data.dtype.itemsize * math.prod(data.shape)
    stored = data.id.get_storage_size()
    if declared > max(BELIEVED_BYTES, MOST_COMPRESSION * stored):
        shape = " x ".join(map(str, data.shape))
        size = f"{declared / 1e12:.1f} TB, of which {stored} bytes are there"
        raise BadHistory(f"{name} is declared as {shape}, {size}")
    if in_memory:
        return data[()]

    offset = data.id.get_offset()
    if offset is None or data.chunks:
        raise BadHistory(f"{name} is compressed or chunked and cannot be mapped", "leave out --no-cache_in_memory")
    return np.memmap(data.file.filename, data.dtype, "r", offset, data.shape)


# --- checking ---------------------------------------------------------------------------------------------------------


def check_goal(goal: int, arrays: dict[str, np.ndarray]) -> int:
    """Raise BadHistory for what is wrong with a goal's arrays.

    Returns how many episodes end with the next one's start as their last next state, as some environments log it.
    """
    shape = arrays["actions"].shape
    for name in FIELDS:
        check_shape(name, arrays[name], shape)
        check_values(name, arrays[name])

    # an episode is over every 20 steps
    if shape[0] < HORIZON:
        raise BadHistory(f"has {shape[0]} steps, less than an episode of {HORIZON}")
    is_last = (np.arange(shape[0]) + 1) % HORIZON == 0
    is_last = is_last[:, None]
    place = first_place(arrays["dones"].astype(bool) != is_last)
    if place:
        step, stream = place
        done = arrays["dones"][place]
        raise BadHistory(f"dones[{step}, {stream}] is {done}; an episode has {HORIZON} steps")
    return check_transitions(goal, arrays, is_last)


def check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise BadHistory for a field that has not the shape of the actions, or two coordinates more."""
    more = (2,) if name in ("states", "next_states") else ()
    if len(shape) != 2 or array.shape != shape + more or 0 in shape:
        expected = "(T, streams, 2)" if more else "(T, streams)"
        raise BadHistory(f"{name} has shape {array.shape}; expected {expected}")


def check_values(name: str, array: np.ndarray) -> None:
    """Raise BadHistory for a value that the field cannot have."""
    limit = LIMITS.get(name)
    with np.errstate(invalid="ignore"):
        if limit:
            wrong = (array != np.floor(array)) | (array < 0) | (array >= limit)
            expected = f"a whole number of 0 to {limit - 1}"
        else:
            wrong = ~np.isfinite(array)
            expected = "a finite number"
    place = first_place(wrong)
    if place:
        raise BadHistory(f"{name}[{place[0]}, {place[1]}] is {array[place]}; expected {expected}")


def check_transitions(goal: int, arrays: dict[str, np.ndarray], is_last: np.ndarray) -> int:
    """Raise BadHistory for steps that Darkroom does not make; see check_goal. is_last: (T, 1), of an episode."""
    states = to_cells(arrays["states"])
    next_states = to_cells(arrays["next_states"])
    actions = np.asarray(arrays["actions"], np.int64)
    rewards = np.asarray(arrays["rewards"])

    # where the actions lead, and which next states are the start of the next episode instead
    led = NEXT[states, actions]
    resets = (next_states != led) & (next_states == START) & is_last

    # each state is where the step before led, or the start of an episode
    expected = np.full_like(states, START)
    expected[1:] = np.where(is_last, START, led)[:-1]

    on_goal = led == goal
    mistakes = {
        "next_states is not where the action leads (0: +i, 1: -i, 2: +j, 3: -j, 4: stay)": (next_states != led)
        & ~resets,
        "states is not where the step before led, or the start of an episode": states != expected,
        f"rewards must be 1 on the goal {divmod(goal, GRID)} alone": on_goal != (rewards == 1),
        "rewards must be 0 or 1": ~on_goal & (rewards != 0),
    }
    for reason, wrong in mistakes.items():
        place = first_place(wrong)
        if place:
            step, stream = place
            raise BadHistory(f"step {step}, stream {stream}: {reason}")
    return int(resets.sum())


def first_place(wrong: np.ndarray) -> tuple[int, ...]:
    """The index of an array's first True; empty where there is none."""
    places = np.argwhere(wrong)
    return tuple(places[0].tolist()) if len(places) else ()
