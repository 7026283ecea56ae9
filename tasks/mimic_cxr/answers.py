"""Map each question of MIMIC-Ext-CXR-QBA to one of the model's answer heads and to a target class."""

# CheXpert labels, spelled as in MIMIC-CXR-JPG
CHEXPERT = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture", "Lung Lesion",
    "Lung Opacity", "No Finding", "Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax", "Support Devices",
)  # fmt: skip
SIDED = (
    "lung", "upper lung zone", "mid lung zone", "lower lung zone", "lung apex", "lung base", "hilum",
    "costophrenic angle", "hemidiaphragm",
)  # fmt: skip
MIDDLE = ("mediastinum", "upper mediastinum", "heart", "aorta", "trachea", "spine", "abdomen")
# answer classes of each head; no class name belongs to two heads
HEADS = {
    "binary": ("no", "yes"),
    "category": tuple(name.lower() for name in CHEXPERT),
    "region": ("lungs", *(f"{side} {name}" for name in SIDED for side in ("left", "right")), *MIDDLE),
    "severity": ("none", "mild", "moderate", "severe"),
}
HEAD_NUMBER = {head: number for number, head in enumerate(HEADS)}
CLASS_OF = {head: {name: number for number, name in enumerate(names)} for head, names in HEADS.items()}

# question types in MIMIC-Ext-CXR-QBA may have a code prefix (`D02_has_finding`) or not (`has_finding`)
HEAD_OF_CODE = {
    **dict.fromkeys(("B10", "B11", "B13", "C03", "C04", "C08", "D02", "D06"), "binary"),
    **dict.fromkeys(("C01", "C02", "D03", "D07"), "region"),
    "D04": "severity",
    **dict.fromkeys(("A", "B08", "B09", "B12", "C07", "D01", "D05"), "category"),
}
CODE_OF_NAME = {
    "indication": "A", "describe_subcat": "B08", "describe_abnormal_subcat": "B09", "describe_device": "B12",
    "has_devices": "B13",
    "describe_region": "C01", "describe_abnormal_region": "C02", "describe_region_device": "C07",
    "has_region_device": "C08",
    "describe_finding": "D01", "has_finding": "D02", "where_is_finding": "D03", "how_severe_is_finding": "D04",
    "has_device": "D06", "where_is_device": "D07",
}  # fmt: skip


def head_of(question_type: str) -> str | None:
    code, _, name = question_type.partition("_")
    if question_type in CODE_OF_NAME:
        return HEAD_OF_CODE[CODE_OF_NAME[question_type]]
    return "binary" if "is_" in (question_type[:3], name[:3]) else HEAD_OF_CODE.get(code)


def target_of(question: dict, head: str) -> tuple[int | None, str]:
    """Return (index of the target class, ""), or (None, reason) if the main answers determine no class.

    The binary head uses the sign of the first main answer, reversed for `is_normal` questions. The other heads use the
    first answer that names a known class. Negative answers are tried last, because they may name absent findings;
    they give no class for `where_is` questions, and "no finding" for the category head.
    """
    mains = [answer for answer in question["answers"] if answer["answer_type"] == "main_answer"]
    if not mains:
        return None, "no main answer"
    kind = question["question_type"]
    if head == "binary":
        sign = mains[0].get("positiveness")
        if sign not in ("pos", "neg"):
            return None, f"positiveness {sign!r}"
        return int((sign == "pos") != ("is_normal" in kind)), ""

    unknown = ""
    for main in sorted(mains, key=lambda answer: answer.get("positiveness") == "neg"):
        absent = main.get("positiveness") == "neg"
        if head == "severity":
            names = [value for name, value, *_ in main.get("modifiers") or () if name == "severity"]
        else:
            names = main.get("regions" if head == "region" else "obs_entities") or ()
        for name in (name.strip().lower() for name in names if isinstance(name, str)):
            if name not in CLASS_OF[head]:
                unknown = unknown or f"{head} {name!r} not in the vocabulary"
            elif absent and "where_is" in kind:
                unknown = unknown or "the finding is absent"
            else:
                return CLASS_OF[head]["no finding" if absent and head == "category" else name], ""
    return None, unknown or f"no {head} given"
