"""What can be wrong in a made-up chest X-ray, and the CheXpert labels that follow."""

from typing import NamedTuple

from numpy.random import Generator

from tasks.mimic_cxr.answers import CHEXPERT

# Of the patient.
SIDES = ("left", "right")

# The middle of a third of a lung, in body coordinates downwards.
ZONES = {"upper lung zone": -0.42, "mid lung zone": -0.1, "lower lung zone": 0.2}

# What makes a lung opaque.
OPACITIES = {"consolidation", "pleural effusion", "edema", "atelectasis", "lung lesion"}


class LungFinding(NamedTuple):
    """How often a lung has this finding, its name in questions, and its region without its side; "": the zone drawn."""

    share: float
    name: str
    region: str = ""


# A lung has at most one of them, so that "what is wrong with the left lung?" has one answer.
LUNG_FINDINGS = {
    "": LungFinding(0.20, ""),
    "consolidation": LungFinding(0.20, "consolidation"),
    "pleural effusion": LungFinding(0.16, "pleural effusion", "costophrenic angle"),
    "pneumothorax": LungFinding(0.12, "pneumothorax", "lung apex"),
    "lung lesion": LungFinding(0.14, "nodule"),
    "atelectasis": LungFinding(0.09, "atelectasis", "lung base"),
    "pleural other": LungFinding(0.09, "pleural thickening", "lung apex"),
}

# What a finding is called in questions.
NAMES = {entity: finding.name for entity, finding in LUNG_FINDINGS.items() if entity}
NAMES["fracture"] = "rib fracture"
NAMES["cardiomegaly"] = "cardiomegaly"
NAMES["edema"] = "pulmonary edema"
NAMES["enlarged cardiomediastinum"] = "wide mediastinum"


class Finding(NamedTuple):
    """One thing that is wrong in a study. `level` 1-3 is mild, moderate or severe; `side` is "" for central ones."""

    entity: str
    side: str
    region: str
    level: int = 2


def draw_findings(rng: Generator) -> list[Finding]:
    """Draw the findings of one study."""
    findings = []

    # The other studies are normal, but for a pacemaker.
    if rng.random() > 0.3:
        findings += draw_lung_findings(rng)
        if rng.random() < 0.4:
            level = int(rng.integers(1, 4))
            findings.append(Finding("cardiomegaly", "", "heart", level))
        if rng.random() < 0.25:
            findings.append(Finding("enlarged cardiomediastinum", "", "mediastinum"))
        if rng.random() < 0.25:
            level = int(rng.integers(1, 4))
            findings.append(Finding("edema", "", "lungs", level))
        if rng.random() < 0.35:
            side = SIDES[rng.integers(2)]
            findings.append(Finding("fracture", side, f"{side} mid lung zone"))

    if rng.random() < 0.5:
        side = SIDES[rng.integers(2)]
        findings.append(Finding("support devices", side, f"{side} upper lung zone"))
    return findings


def draw_lung_findings(rng: Generator) -> list[Finding]:
    """Draw at most one finding for each lung."""
    entities = list(LUNG_FINDINGS)
    shares = [finding.share for finding in LUNG_FINDINGS.values()]
    zones = list(ZONES)

    findings = []
    for side in SIDES:
        choice = rng.choice(len(entities), p=shares)
        entity = entities[choice]
        if entity:
            region = LUNG_FINDINGS[entity].region or zones[rng.integers(3)]
            level = int(rng.integers(1, 4))
            findings.append(Finding(entity, side, f"{side} {region}", level))
    return findings


def chexpert_labels(findings: list[Finding]) -> dict[str, bool]:
    """The 14 labels that follow from the findings."""
    entities = {finding.entity for finding in findings}
    labels = {name: name.lower() in entities for name in CHEXPERT}
    labels["Lung Opacity"] = bool(entities & OPACITIES)
    labels["No Finding"] = not entities - {"support devices"}

    # A consolidation in the upper zone is no pneumonia.
    consolidations = [finding for finding in findings if finding.entity == "consolidation"]
    labels["Pneumonia"] = any("upper" not in finding.region for finding in consolidations)
    return labels
