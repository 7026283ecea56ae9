"""How the grey values of guide 3's X-rays follow from line integrals, and the check that each X-ray is of its CT."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from old.cli_utils import InputError
from tasks.cascade.files import Patient
from tasks.cascade.views import PA, View

# From so many patients on, what is peculiar to each of them is compared.
MANY_PATIENTS = 5
# Less than this correlation with its CT's projection is an error; so much is plain evidence of something else, where
# Fisher's z, which tells .98 from .999, is by so much larger.
LEAST_CORRELATION = 0.5
PLAIN_CORRELATION = 0.8
Z_MARGIN = 0.3


class GreyFit(NamedTuple):
    """Of a view: grey value (-1..1) = slope * line integral + offset, by least squares, with their correlation.

    noise: by how much a line integral that is read off an X-ray is wrong, as a standard deviation.
    """

    view: View
    slope: float
    offset: float
    correlation: float
    noise: float


# Where no data tells, as in a step that is only tried.
UNKNOWN_GREY = GreyFit(PA, 1.0, 0.0, 1.0, 0.0)


def fit_greys(
    integrals: np.ndarray,
    images: np.ndarray,
    views: tuple[View, ...],
) -> list[GreyFit]:
    """How each view's grey values follow from line integrals, over all patients: (patients, views, rows, columns)."""
    fits = []
    for k, view in enumerate(views):
        x = integrals[:, k].ravel().astype(np.float64)
        y = images[:, k].ravel().astype(np.float64)
        covariance = ((x - x.mean()) * (y - y.mean())).mean()
        slope = float(covariance / x.var())
        offset = float(y.mean() - slope * x.mean())
        correlation = float(np.corrcoef(x, y)[0, 1])
        # what the straight line does not explain
        noise = float((y - offset - slope * x).std()) / max(abs(slope), 1e-6)
        fits.append(GreyFit(view, slope, offset, correlation, noise))
    return fits


def standardised(images: np.ndarray) -> np.ndarray:
    """(N, side, side) -> (N, pixels), each image with mean 0 and length 1."""
    flat = images.reshape(len(images), -1).astype(np.float64)
    centred = flat - flat.mean(1, keepdims=True)
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    return centred / np.maximum(length, 1e-12)


def correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(N, side, side) x 2 -> (N, N): Pearson correlation of each image of the second with each of the first."""
    return standardised(second) @ standardised(first).T


def peculiar(
    integrals: np.ndarray,
    images: np.ndarray,
    up: int = 1,
    along: int = 1,
) -> np.ndarray:
    """(N, N) correlations of one view's (turned) images with the projections, of what differs from the mean.

    With few patients the mean is too much like each of them, and whole images are compared.
    """
    turned = images[:, ::up, ::along]
    if len(images) < MANY_PATIENTS:
        return correlations(integrals, turned)
    return correlations(integrals - integrals.mean(0), turned - turned.mean(0))


def median_own(table: np.ndarray) -> float:
    """The median of what patients' images have in common with their own projections."""
    return float(np.median(np.diag(table)))


def check_turn(
    view: str,
    integrals: np.ndarray,
    images: np.ndarray,
) -> float:
    """The median correlation of a view's images as they lie. Raises InputError where all are turned alike."""
    mirror = f"--flip_drrs_horizontal {view}" if view in ("pa", "lat") else f"the {view} files mirrored"
    turns = {
        "--flip_drrs_vertical the other way": (-1, 1),
        mirror: (1, -1),
        f"--flip_drrs_vertical the other way and {mirror}": (-1, -1),
    }
    turned = {}
    for name, (up, along) in turns.items():
        turned[name] = median_own(peculiar(integrals, images, up, along))
    best = max(turned, key=lambda name: abs(turned[name]))
    now = median_own(peculiar(integrals, images))

    # a turn must win by a margin; hardly one where it also makes negatives positive, or the reverse
    margin = 0.1 if len(images) >= MANY_PATIENTS else 0.05
    if now * turned[best] < 0 and abs(turned[best]) >= 0.5:
        margin = 0.01
    if abs(turned[best]) > abs(now) + margin:
        reason = f"the {view} pictures do not lie as the CTs do (median correlation {now:.2f}, turned"
        raise InputError(f"--dataset_path: {reason} {turned[best]:.2f}); give {best}")
    return now


def fisher_z(correlation: float) -> float:
    """Fisher's transformation of a correlation, finite at 1 too."""
    return float(np.arctanh(np.clip(correlation, -0.9999, 0.9999)))


def fitting_change(
    integrals: np.ndarray,
    image: np.ndarray,
    k: int,
    names: list[str],
    sign: float,
) -> tuple[str, float]:
    """(what must be done to a single image so that it fits its CT best, for an error message, and its correlation).

    integrals: of each view (views, side, side). k: the view that the image is said to be. sign: -1 where the images of
    this view are negatives.
    """
    turns = {
        "": (1, 1),
        "upside down": (-1, 1),
        "mirrored": (1, -1),
        "turned by 180 degrees": (-1, -1),
    }
    found = {}
    for turn, (up, along) in turns.items():
        turned = image[None, ::up, ::along]
        value = sign * float(correlations(integrals[k : k + 1], turned)[0, 0])
        negative = f"{turn} and as a negative" if turn else "as a negative"
        found[f"{negative} it fits"] = -value
        if turn:
            found[f"{turn} it fits"] = value

    # or it is of another view
    likeness = sign * correlations(integrals, image[None])[0]
    for j, name in enumerate(names):
        if j != k:
            found[f"it looks like the {name} view"] = float(likeness[j])
    best = max(found, key=found.__getitem__)
    return best, found[best]


def fitting_patient(
    place: int,
    table: np.ndarray,
    patients: list[Patient],
) -> tuple[str, float]:
    """(whose CT an image fits best, for an error message, and the correlation), of a table of peculiar()."""
    best = int(table[place].argmax())
    return f"it fits the CT of {patients[best].id}", float(table[place, best])


def check_alignment(
    patients: list[Patient],
    integrals: np.ndarray,
    images: np.ndarray,
    views: tuple[View, ...],
) -> None:
    """Whether each X-ray is one of its own CT, as one looks at the patient. Raises InputError naming those that aren't.

    An image must look like its CT's projection (|r| >= 0.5), and not clearly more so turned, as a negative or as
    another view. With 5 patients or more, what is peculiar to a patient (the difference from the mean image) must agree
    too: where all are turned alike, the turn that helps is named; an image whose agreement lies far below the others'
    (by 0.5) belongs to somebody else, and is said to fit whom it fits best. Negative images (bone dark) are as good,
    where all of a view are. A mirrored image of an asymmetric crop looks like a negative, so sign and turn are chosen
    together, by the largest |r|.
    """
    names = [view.name for view in views]
    for k, view in enumerate(names):
        seen = images[:, k]
        expected = integrals[:, k]
        now = check_turn(view, expected, seen)
        own = np.diag(correlations(expected, seen))
        sign = 1.0 if np.median(own) >= 0 else -1.0
        own = sign * own

        # those that agree far less than the others in what is peculiar to a patient, where that tells patients apart
        table = sign * peculiar(expected, seen)
        tells_apart = len(patients) >= MANY_PATIENTS and sign * now > 0.6
        strangers = tells_apart & (np.diag(table) < sign * now - 0.5)

        # {place of a patient: what its image is instead, if that is known}
        wrong: dict[int, str] = {}
        for place, correlation in enumerate(own):
            change, fit = fitting_change(integrals[place], seen[place], k, names, sign)
            fits_better = fisher_z(fit) > fisher_z(correlation) + Z_MARGIN
            misfits = correlation < LEAST_CORRELATION
            is_plain = fits_better and fit > PLAIN_CORRELATION
            if not (strangers[place] or misfits or is_plain):
                continue

            # of a stranger's image, whose it is instead
            if strangers[place]:
                other, likeness = fitting_patient(place, table, patients)
                if not fits_better or likeness > fit:
                    change, fit = other, likeness
            known = fit > max(LEAST_CORRELATION, correlation)
            wrong[place] = f"; {change} ({fit:.2f})" if known else ""
        if wrong:
            refuse(patients, view, k, own, wrong)


def refuse(
    patients: list[Patient],
    view: str,
    k: int,
    own: np.ndarray,
    wrong: dict[int, str],
) -> None:
    """Raises InputError for the images of a view, the k-th, that are not of their CT, naming the first in full."""
    place = min(wrong)
    patient = patients[place]
    more = ""
    if len(wrong) > 1:
        names = ", ".join(patients[other].id for other in sorted(wrong)[:8])
        more = f" ({len(wrong)} patients: {names}{' ...' if len(wrong) > 8 else ''})"
    xray: Path = patient.xrays[k]
    reason = f"not a {view} picture of {patient.ct} (correlation {own[place]:.2f}){wrong[place]}{more}"
    raise InputError(f"{xray}: {reason}; put the right one there, or --skip_alignment_check")
