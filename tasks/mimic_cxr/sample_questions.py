"""Ask questions about a made-up chest X-ray study, with the answers that follow from its findings, as in a .qa.json."""

from collections import Counter
from typing import NamedTuple

from numpy.random import Generator

from tasks.mimic_cxr.sample_findings import LUNG_FINDINGS, NAMES, SIDES, Finding

SEVERITIES = ("none", "mild", "moderate", "severe")

# The findings whose severity is asked for, and those that are said without an article.
GRADED = ("pleural effusion", "pneumothorax", "cardiomegaly", "edema")
UNCOUNTED = ("consolidation", "atelectasis", "pleural other", "cardiomegaly", "edema")

SUBCATEGORIES = {
    "pleura": ("pleural effusion", "pneumothorax", "pleural other"),
    "lung tissue": ("consolidation", "lung lesion", "atelectasis", "edema"),
    "heart": ("cardiomegaly",),
    "rib cage": ("fracture",),
}

# By the first letter of a question's kind.
STRATEGIES = {"A": "indication", "B": "abnormal", "C": "region_abnormal", "D": "finding"}

# How each kind of question is put.
WORDINGS = {
    "A_indication": ("Rule out {}: what is found?", "Referred because of possible {}. What does the picture show?"),
    # These are about the whole study.
    "B01_describe_all": ("Describe the study.", "Please describe all that can be seen."),
    "B03_is_abnormal": ("Is the study abnormal?", "Is there anything abnormal?", "Are there abnormal findings?"),
    "B04_is_normal": ("Is the study normal?", "Is everything normal?", "Is this a normal chest X-ray?"),
    # These are about a subcategory.
    "B08_describe_subcat": ("Describe the {}.", "What can be said about the {}?", "How does the {} look?"),
    "B09_describe_abnormal_subcat": ("What is abnormal about the {}?", "Describe the abnormal findings of the {}."),
    "B10_is_abnormal_subcat": ("Is the {} abnormal?", "Are there abnormal findings of the {}?"),
    "B11_is_normal_subcat": ("Is the {} normal?", "Does the {} look normal?"),
    # These are about devices and the image itself.
    "B12_describe_device": ("Describe the support devices.", "Which devices can be seen?"),
    "B13_has_devices": ("Are there any devices?", "Can a support device be seen?"),
    "B14_describe_acquisition": ("How was the picture taken?",),
    "B16_has_imaging_artifacts": ("Are there imaging artifacts?",),
    # These are about a region.
    "C01_describe_region": ("Describe the {}.", "Which part of the {} stands out?"),
    "C02_describe_abnormal_region": ("Which lung is abnormal?", "Describe the abnormal lung."),
    "C03_is_abnormal_region": ("Is the {} abnormal?", "Is there anything abnormal in the {}?"),
    "C04_is_normal_region": ("Is the {} normal?", "Does the {} look normal?"),
    "C07_describe_region_device": ("Describe the devices on the {} side.", "Which devices lie on the {} side?"),
    "C08_has_region_device": ("Is there a device on the {} side?", "Does a device lie on the {} side?"),
    # These are about a finding.
    "D01_describe_finding": ("What is the finding in the {}?", "Describe the finding in the {}."),
    "D02_has_finding": ("Is there {}?", "Does the picture show {}?", "Can {} be seen?"),
    "D03_where_is_finding": ("Where is the {}?", "In which region is the {}?"),
    "D04_how_severe_is_finding": ("How severe is the {}?", "What is the severity of the {}?"),
    # These are about one device.
    "D05_describe_device": ("Describe the pacemaker.", "What can be said about a pacemaker?"),
    "D06_has_device": ("Is there a pacemaker on the {} side?", "Does a pacemaker lie on the {} side?"),
    "D07_where_is_device": ("Where is the pacemaker?", "In which region is the pacemaker?"),
}


class Topic(NamedTuple):
    """What a question can be about: a finding, there or not, and its side ("": none)."""

    entity: str
    side: str


class Tags(NamedTuple):
    """What an answer is tagged with; `number` is that of its finding among the study's, None for none of them."""

    regions: list[str]
    obs_entities: list[str]
    positiveness: str
    modifiers: list[list[str]]
    number: int | None


NO_FINDING = Tags([], ["no finding"], "neg", [], None)


class Study:
    """A study, and the questions about it so far.

    boxes: of each image, by its dicom_id, a box for each finding. ill: the findings without the device. in_lung: what
    each lung has. absent: what could be asked for and is not there.
    """

    def __init__(self, rng: Generator, findings: list[Finding], boxes: dict[str, list]):
        self.rng = rng
        self.findings = findings
        self.boxes = boxes
        self.questions: list[dict] = []
        self.counts = Counter()

        by_entity = {finding.entity: finding for finding in findings}
        self.device = by_entity.get("support devices")
        self.edema = by_entity.get("edema")
        self.ill = [finding for finding in findings if finding.entity != "support devices"]
        self.in_lung = dict.fromkeys(SIDES)
        for finding in self.ill:
            if finding.entity in LUNG_FINDINGS:
                self.in_lung[finding.side] = finding

        present = {Topic(finding.entity, finding.side) for finding in self.ill}
        self.absent = [topic for topic in all_topics() if topic not in present]

    def chance(self, share: float) -> bool:
        """Draw whether something that happens so often happens."""
        return self.rng.random() < share

    def pick(self, items):
        """Draw one of the items; None when there is none."""
        if not items:
            return None
        choice = self.rng.integers(len(items))
        return items[choice]

    def quality(self) -> int:
        """Draw a grade, 3 to 6."""
        return int(self.rng.integers(3, 7))

    def ask(self, kind: str, subject: str, text: str, finding: Finding | None = None, **changed) -> None:
        """Add a question whose main answer is `text`; `changed` are tags other than those of the finding."""
        self.counts[kind] += 1
        question_id = f"{kind}_{self.counts[kind]:03d}"
        wording = self.pick(WORDINGS[kind])
        tags = self.tags_of(finding)._replace(**changed)
        main = self.answer(f"{question_id}_A1", "main_answer", text, tags)
        answers = [main]

        # Descriptions also list what is absent.
        if "describe" in kind and not changed and self.chance(0.5):
            absent = self.absent_answers(question_id)
            if absent:
                answers = absent + answers if finding else absent
        if finding is not None and self.chance(0.3):
            answers += self.details(question_id, finding)

        # Something else stands before the main answer now and then: what counts is answer_type.
        if self.chance(0.1):
            other = self.answer(f"{question_id}_A0", "related_information", "No other change.", NO_FINDING)
            answers.insert(0, other)

        observations = []
        if tags.number is not None:
            observations.append(f"O{tags.number + 1:02d}")
        question = {
            "question_id": question_id,
            "question_type": kind,
            "question_strategy": STRATEGIES[kind[0]],
            "variables": {"subject": subject},
            "obs_ids": observations,
            "question": wording.format(subject),
            "answers": answers,
            "question_quality": {"clarity": self.quality(), "completeness": self.quality()},
        }
        self.questions.append(question)

    def ask_whether(self, kind: str, subject: str, finding: Finding | None) -> None:
        """Ask a question of yes or no.

        `positiveness` tells of the finding, also where normality is asked for: then pos goes with the answer no.
        """
        is_abnormal = finding is not None
        yes = is_abnormal != ("is_normal" in kind)
        self.ask(kind, subject, "Yes." if yes else "No.", finding)

    def tags_of(self, finding: Finding | None) -> Tags:
        """The tags of an answer that tells of a finding, or that there is none."""
        if finding is None:
            return NO_FINDING
        severity = SEVERITIES[finding.level]
        number = self.findings.index(finding)
        return Tags([finding.region], [finding.entity], "pos", [["severity", severity]], number)

    def answer(self, answer_id: str, kind: str, text: str, tags: Tags) -> dict:
        """One answer, with the boxes of its finding in each image."""
        localization = {}
        if tags.number is not None:
            for dicom_id, boxes in self.boxes.items():
                box = boxes[tags.number]
                localization[dicom_id] = {"image_id": dicom_id, "bboxes": [box]}

        # The certainty, the level and the category are the same in all answers here.
        return {
            "answer_id": answer_id,
            "answer_type": kind,
            "answer_level": 0,
            "text": text,
            "regions": tags.regions,
            "obs_entities": tags.obs_entities,
            "obs_categories": ["ANATOMICAL_FINDING"],
            "certainty": "certain",
            "positiveness": tags.positiveness,
            "modifiers": tags.modifiers,
            "localization": localization,
            "sub_answers": [],
            "answer_quality": {"entailment": self.quality(), "relevance": 6},
        }

    def absent_answers(self, question_id: str) -> list[dict]:
        """An answer that names a finding that is absent; none when the finding drawn is there."""
        entity, name = self.pick(sorted(NAMES.items()))
        if any(finding.entity == entity for finding in self.findings):
            return []
        tags = NO_FINDING._replace(obs_entities=[entity], regions=["lungs"])
        absent = self.answer(f"{question_id}_A3", "main_answer", f"There is no {name}.", tags)
        return [absent]

    def details(self, question_id: str, finding: Finding) -> list[dict]:
        """An answer with details, which has an answer of its own below it."""
        text = f"It lies in the {finding.region}."
        tags = self.tags_of(finding)._replace(regions=["chest wall"])
        details = self.answer(f"{question_id}_A2", "details", text, tags)
        below = self.answer(f"{question_id}_A2.1", "details", "Nothing else of note.", NO_FINDING)
        details["sub_answers"] = [below]
        return [details]


def all_topics() -> list[Topic]:
    """Every finding, on each side where it has one."""
    topics = []
    for entity in NAMES:
        has_side = entity in LUNG_FINDINGS or entity == "fracture"
        sides = SIDES if has_side else ("",)
        for side in sides:
            topics.append(Topic(entity, side))
    return topics


def phrase(topic: Topic | Finding, article: bool = False) -> str:
    """A finding in words, as "a nodule in the left lung"."""
    words = NAMES[topic.entity]
    if article and topic.entity not in UNCOUNTED:
        words = f"a {words}"
    if topic.entity == "fracture":
        return f"{words} on the {topic.side} side"
    if topic.side:
        return f"{words} in the {topic.side} lung"
    return words


def study_questions(rng: Generator, findings: list[Finding], boxes: dict[str, list]) -> list[dict]:
    """Ask about one study; boxes has for each image, by its dicom_id, a box per finding."""
    study = Study(rng, findings, boxes)
    ask_about_all(study)
    ask_for_findings(study)
    ask_about_lungs(study)
    ask_about_regions(study)
    ask_about_subcategories(study)
    ask_for_severities(study)
    ask_about_devices(study)
    ask_without_target(study)
    return study.questions


def ask_about_all(study: Study) -> None:
    """Ask about the study as a whole."""
    ill = study.ill
    names = [NAMES[finding.entity] for finding in ill]
    first = ill[0] if ill else None
    study.ask("B01_describe_all", "", "; ".join(names) or "Normal.", first)
    study.ask("B16_has_imaging_artifacts", "", "No.")
    if study.chance(0.1):
        study.ask("B14_describe_acquisition", "", "Upright.", positiveness="neutral")

    # As many questions are asked about normal studies as about others.
    if not ill or study.chance(0.45):
        study.ask_whether("B03_is_abnormal", "", study.pick(ill))
        study.ask_whether("B04_is_normal", "", study.pick(ill))


def ask_for_findings(study: Study) -> None:
    """Ask whether something is there: half of the answers are yes.

    Half of the others name a finding of the other lung.
    """
    present = {finding.entity for finding in study.ill}
    mirrored = [topic for topic in study.absent if topic.side and topic.entity in present]
    kinds = ["D02_has_finding"] * 4 + ["A_indication"]
    for kind in kinds:
        is_indication = kind == "A_indication"
        share = 0.75 if is_indication else 0.68
        finding = None
        if study.ill and study.chance(share):
            finding = study.pick(study.ill)
            topic = finding
        elif mirrored and study.chance(0.6):
            topic = study.pick(mirrored)
        else:
            topic = study.pick(study.absent)

        if is_indication:
            text = NAMES[topic.entity] if finding else "Nothing."
            study.ask(kind, phrase(topic), text, finding)
        else:
            study.ask_whether(kind, phrase(topic, article=True), finding)


def ask_about_lungs(study: Study) -> None:
    """Ask what each lung has and where, and which lung is abnormal."""
    entities = [finding.entity for finding in study.ill]
    for side, finding in study.in_lung.items():
        lung = f"{side} lung"
        if not study.edema and (finding or study.chance(0.3)):
            name = NAMES[finding.entity] if finding else "Nothing."
            study.ask("D01_describe_finding", lung, name, finding)
            if finding:
                study.ask("C01_describe_region", lung, "See the region.", finding)
            else:
                study.ask("C01_describe_region", lung, "See the region.", regions=[lung])

        # With the same finding on both sides "where?" would have two answers.
        if finding and entities.count(finding.entity) == 1:
            text = f"In the {finding.region}."
            study.ask("D03_where_is_finding", NAMES[finding.entity], text, finding)

    # Edema is in both lungs.
    hits = [study.edema, *study.in_lung.values()]
    hits = [finding for finding in hits if finding]
    both = study.edema or all(study.in_lung.values())
    share = 0.3 if both else 1.0
    if study.chance(share) and hits:
        region = "lungs" if both else f"{hits[0].side} lung"
        study.ask("C02_describe_abnormal_region", "", "See the region.", hits[0], regions=[region])


def ask_about_regions(study: Study) -> None:
    """Ask whether a region is abnormal, and whether it is normal."""
    regions = ("left lung", "right lung", "heart", "mediastinum")
    for kind in ("C03_is_abnormal_region", "C04_is_normal_region"):
        region = study.pick(regions)
        hits = [finding for finding in study.ill if lies_in(finding, region)]
        if study.edema and "lung" in region:
            hits.append(study.edema)
        study.ask_whether(kind, region, study.pick(hits))


def lies_in(finding: Finding, region: str) -> bool:
    """Whether a finding is one of this region; a rib is no part of a lung."""
    if finding.region == region:
        return True
    if finding.entity == "fracture":
        return False
    return f"{finding.side} lung" == region


def ask_about_subcategories(study: Study) -> None:
    """Describe the pleura or the like, and ask whether it is abnormal and whether it is normal."""
    findings = {}
    clear = {}
    for name, entities in SUBCATEGORIES.items():
        hits = [finding for finding in study.ill if finding.entity in entities]
        findings[name] = hits

        # A description of several findings would have no single category.
        if len({finding.entity for finding in hits}) < 2:
            clear[name] = hits

    for kind in ("B08_describe_subcat", "B09_describe_abnormal_subcat"):
        name = pick_subcategory(study, clear)

        # Else "no finding" would be most of the answers.
        if not clear[name] and study.chance(0.4):
            continue
        text = "See the finding." if clear[name] else "Nothing."
        study.ask(kind, name, text, study.pick(clear[name]))

    for kind in ("B10_is_abnormal_subcat", "B11_is_normal_subcat"):
        name = pick_subcategory(study, findings)
        study.ask_whether(kind, name, study.pick(findings[name]))


def pick_subcategory(study: Study, findings: dict[str, list[Finding]]) -> str:
    """Draw the name of a subcategory, more often one that has findings."""
    full = [name for name, hits in findings.items() if hits]
    empty = [name for name, hits in findings.items() if not hits]
    if full and study.chance(0.75):
        return study.pick(full)
    return study.pick(empty or full)


def ask_for_severities(study: Study) -> None:
    """Ask how severe each finding is that has a severity, and at times about one that is absent."""
    for finding in study.ill:
        if finding.entity in GRADED:
            severity = SEVERITIES[finding.level]
            text = f"{severity.capitalize()}."
            study.ask("D04_how_severe_is_finding", phrase(finding), text, finding)

    if study.chance(0.5):
        absent = [topic for topic in study.absent if topic.entity in GRADED]
        subject = phrase(study.pick(absent))
        none = ["severity", "none"]
        study.ask("D04_how_severe_is_finding", subject, "There is none.", modifiers=[none])


def ask_about_devices(study: Study) -> None:
    """Ask about the pacemaker: whether it is there, on which side, and where."""
    device = study.device
    side = device.side if device and study.chance(0.85) else study.pick(SIDES)
    on_side = device if device and device.side == side else None
    study.ask_whether("B13_has_devices", "", device)
    study.ask_whether("C08_has_region_device", side, on_side)
    study.ask_whether("D06_has_device", side, on_side)

    text = "A pacemaker." if device else "None."
    study.ask("B12_describe_device", "", text, device)
    text = "A pacemaker." if on_side else "None."
    study.ask("C07_describe_region_device", side, text, on_side)
    if study.chance(0.5):
        text = "It lies over the chest." if device else "There is none."
        study.ask("D05_describe_device", "", text, device)
    if device:
        study.ask("D07_where_is_device", "", f"Over the {device.region}.", device)


def ask_without_target(study: Study) -> None:
    """Ask questions whose answers have no target.

    Names outside the vocabulary, neither yes nor no, no severity given.
    """
    if study.chance(0.3):
        scar = "old scar"
        place = "azygos fissure"
        study.ask("D03_where_is_finding", scar, f"At the {place}.", regions=[place])
        study.ask("D02_has_finding", scar, "That cannot be told.", positiveness="neutral")
        study.ask("D04_how_severe_is_finding", scar, "Not given.", obs_entities=["scar"])
        study.ask("D01_describe_finding", scar, "A scar.", obs_entities=["scar"], positiveness="pos")
