"""Darkroom: a 9 x 9 grid with a hidden goal, the split of its 81 goals, and what the best and a random policy reach.

Cells are row-major (cell = 9 i + j). An episode of 20 steps begins in the middle, and each step that ends on the goal
is rewarded with 1. Goal g is cell g.
"""

import random

import numpy as np

GRID = 9
CELLS = GRID * GRID
START = CELLS // 2
HORIZON = 20

# The actions go down (+i), up (-i), right (+j), left (-j), and stay.
MOVES = (
    (1, 0),
    (-1, 0),
    (0, 1),
    (0, -1),
    (0, 0),
)
ACTIONS = len(MOVES)


def to_cells(places: np.ndarray) -> np.ndarray:
    """Cells (...) of places (..., 2)."""
    places = np.asarray(places, np.int64)
    return places @ (GRID, 1)


def to_places(cells: np.ndarray) -> np.ndarray:
    """Places (..., 2) of cells (...)."""
    rows = cells // GRID
    columns = cells % GRID
    return np.stack([rows, columns], -1)


# The place (i, j) of each cell, and the cell (81, 5) to which each action leads; walls hold.
PLACES = to_places(np.arange(CELLS))
PLACES_AFTER = np.clip(PLACES[:, None] + MOVES, 0, GRID - 1)
NEXT = to_cells(PLACES_AFTER)


def split_goals(seed: int = 0, num_test: int = 8) -> tuple[list[int], list[int]]:
    """(73 training goals, 8 unseen ones). Seed 0 gives the split of the published results."""
    goals = list(range(CELLS))
    random.Random(seed).shuffle(goals)
    return goals[:-num_test], goals[-num_test:]


def optimal_return(goals) -> np.ndarray:
    """Best return of an episode: 21 - the Manhattan distance from the start, at most the 20 steps."""
    places = PLACES[np.asarray(goals)]
    distance = np.abs(places - PLACES[START]).sum(-1)
    best = HORIZON + 1 - distance
    return best.clip(max=HORIZON).astype(float)


def random_return(goals) -> np.ndarray:
    """Expected return of an episode of uniformly random actions, exact."""
    step = np.zeros((CELLS, CELLS))
    cells = np.repeat(np.arange(CELLS), ACTIONS)
    np.add.at(step, (cells, NEXT.ravel()), 1 / ACTIONS)

    # the chance to be in each cell, and its sum over the steps
    chance = np.zeros(CELLS)
    chance[START] = 1
    visits = np.zeros(CELLS)
    for _ in range(HORIZON):
        chance = chance @ step
        visits += chance
    return visits[np.asarray(goals)]
