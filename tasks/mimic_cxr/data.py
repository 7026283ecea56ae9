"""Guide 1's questions: a study's image, decoded and cached, with its question, its target and its CheXpert labels."""

import contextlib
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from old.cli_utils import InputError
from old.distributed_utils import create_distributed_dataloader
from old.image_order_utils import ImageGroups, begins_of_runs
from old.image_utils import open_gray
from old.question_utils import distinct
from tasks.mimic_cxr.answers import CHEXPERT, HEADS
from tasks.mimic_cxr.index import Index
from tasks.mimic_cxr.releases import image_name

# The releases' names of the splits.
RELEASE_SPLITS = {"train": "train", "val": "validate", "test": "test"}
# What an uncertain CheXpert label (-1) is in training; None: it is masked.
UNCERTAIN = {
    "ignore": None,
    "positive": 1.0,
    "negative": 0.0,
    "soft": 0.5,
}
# Stands for a question that cannot be read.
NO_QUESTION = {
    "study": 0,
    "head": 0,
    "target": 0,
    "type": "",
    "id": "",
    "question": "",
}


def decode(path: str, size: int) -> np.ndarray:
    """(size, size) uint8: the whole image, its sides in proportion, black beside it.

    The JPEG is decoded at the smallest scale that is still twice the wanted size: several times faster, no difference
    that a 224-pixel image shows.
    """
    image = open_gray(path, 2 * size)
    scale = size / max(image.size)
    sides = [max(1, round(side * scale)) for side in image.size]
    small = image.resize(sides, Image.Resampling.BILINEAR)

    # in the middle of a black square
    square = np.zeros((size, size), np.uint8)
    top = (size - small.height) // 2
    left = (size - small.width) // 2
    rows = slice(top, top + small.height)
    columns = slice(left, left + small.width)
    square[rows, columns] = np.asarray(small)
    return square


class ImageCache:
    """Decoded images in one sparse file, each with a checksum: shared by all ranks and workers without any lock.

    Two that write the same image write the same bytes, and what a crash left half written does not match its sum.
    """

    def __init__(self, path: Path, size: int, limit: int):
        """size: pixels of a side. limit: how many images are kept, 0 for none."""
        self.size = size
        self.limit = limit
        self.record = size * size + 4
        self.file = None
        if limit and hasattr(os, "pread"):
            # without a folder that may be written, nothing is kept
            with contextlib.suppress(OSError):
                self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def get(self, number: int, path: str) -> np.ndarray:
        """Image `number`, which lies at `path`. Raises what PIL raises for an unreadable one."""
        if self.file is None or number >= self.limit:
            return decode(path, self.size)

        # what is there already, if it is whole
        offset = number * self.record
        data = os.pread(self.file, self.record, offset)
        pixels = data[:-4]
        if len(data) == self.record and checksum(pixels) == data[-4:]:
            return np.frombuffer(pixels, np.uint8).reshape(self.size, self.size)

        # a full disk keeps nothing more
        image = decode(path, self.size)
        data = image.tobytes()
        with contextlib.suppress(OSError):
            os.pwrite(self.file, data + checksum(data), offset)
        return image


def checksum(data: bytes) -> bytes:
    """The four bytes that an image in the cache ends with."""
    return zlib.crc32(data).to_bytes(4, "little")


def open_image_cache(index: Index, size: int, cache_gb: float) -> ImageCache:
    """The cache beside an index. cache_gb: GiB of disk it may take."""
    fitting = int(cache_gb * 2**30) // (size**2 + 4)
    limit = min(fitting, len(index.studies))
    return ImageCache(index.folder / f"pictures_{size}.u8", size, limit)


class QuestionData(Dataset):
    """The questions of one split, each with the image and the CheXpert labels of its study."""

    # the labels that training knows, and of how many questions these were drawn (see limit_questions)
    trained: tuple[str, ...] = CHEXPERT
    drawn_from: int | None = None

    def __init__(
        self,
        index: Index,
        split: str,
        root: str,
        cache: ImageCache,
        tokenizer,
        max_question_length: int,
        chexpert_uncertain: str = "ignore",
        max_samples: int = 0,
    ):
        """root: the folder with files/. max_samples: so many questions, evenly spaced; 0: all."""
        self.index = index
        self.split = split
        self.root = root
        self.cache = cache
        self.tokenizer = tokenizer
        self.max_question_length = max_question_length
        self.uncertain = UNCERTAIN[chexpert_uncertain]
        self.rows = index.questions(RELEASE_SPLITS[split])
        self.count = min(max_samples or len(self.rows), len(self.rows))
        self.labels = [index.studies[name].to_numpy() for name in CHEXPERT]

    def __len__(self) -> int:
        return self.count

    def image_of(self) -> np.ndarray:
        """int32 (N,): the study of each question, whose image it is about."""
        studies = np.concatenate(list(self.rows.studies()))
        if self.count == len(studies):
            return studies
        return studies[np.arange(self.count) * len(studies) // self.count]

    def count_images(self) -> int:
        """How many images the questions are about."""
        if self.count < len(self.rows):
            return len(np.unique(self.image_of()))
        # a study lies in one part, its questions one after another; nothing is read but this column
        return sum(len(begins_of_runs(studies)) for studies in self.rows.studies())

    def row(self, i: int) -> dict:
        """Question i as in the index."""
        return self.rows.take(i * len(self.rows) // self.count)

    def study_column(self, name: str, study: int):
        """A study's value in the index, such as its study_id."""
        return self.index.studies[name][study].as_py()

    def image_path(self, study: int) -> str:
        """The image of a study: the release's JPEG, or as a user's table names it."""
        if "image" in self.index.studies.schema.names:
            return f"{self.root}/{self.study_column('image', study)}"
        subject_id = self.study_column("subject_id", study)
        study_id = self.study_column("study_id", study)
        dicom_id = self.study_column("dicom_id", study)
        return f"{self.root}/{image_name(subject_id, study_id, dicom_id)}"

    def __getitem__(self, i: int) -> dict:
        """Question i, see __getitems__."""
        return self.__getitems__([i])[0]

    def __getitems__(self, places: list[int]) -> list[dict]:
        """The questions of a batch, each with its image (S, S) uint8, which those of one study share.

        `error` says why one cannot be used, which all ranks are told.
        """
        images: dict[int, np.ndarray] = {}
        return [self._question(i, images) for i in places]

    def _question(self, i: int, images: dict[int, np.ndarray]) -> dict:
        """Question i. images: of the studies that were read already."""
        size = self.cache.size
        image = np.zeros((size, size), np.uint8)
        try:
            row = self.row(i)
        except InputError as reason:
            # a file of the index is gone or damaged since the start
            error = f"{str(reason).split('; ')[0]}; replace it and go on"
            return NO_QUESTION | {"index": i, "image": image, "error": error}

        study = row["study"]
        if study in images:
            return row | {"index": i, "image": images[study], "error": ""}
        path = self.image_path(study)
        error = ""
        try:
            image = images[study] = self.cache.get(study, path)
        except Exception as reason:
            error = f"{path}: not a readable picture ({str(reason).replace(path, 'file')}); replace it and go on"
        return row | {"index": i, "image": image, "error": error}

    def collate(self, items: list[dict]) -> dict:
        """A batch: question tokens (B, T), targets (B,), CheXpert labels (B, 14), images (I, 1, S, S) uint8.

        image_of: which of the images each question is about; questions of one study hold the same array. keys: the
        number of each image, on the host.
        """
        questions = [item["question"] for item in items]
        tokens = self.tokenizer(
            questions, padding=True, truncation=True, max_length=self.max_question_length, return_tensors="pt"
        )
        firsts, image_of = distinct([item["image"] for item in items])
        images = np.stack([items[place]["image"] for place in firsts])
        studies = [item["study"] for item in items]
        label, known = self.training_labels(studies)
        errors = [item["error"] for item in items if item["error"]]

        # the first reason why one of them cannot be used is told
        batch = {
            "image": torch.from_numpy(images[:, None]),
            "image_of": torch.tensor(image_of),
            "ids": tokens["input_ids"],
            "mask": tokens["attention_mask"],
            "label": label,
            "known": known,
            "type": [item["type"] for item in items],
            "keys": [studies[place] for place in firsts],
            "error": errors[0] if errors else "",
        }
        for name in ("index", "head", "target", "study"):
            batch[name] = torch.tensor([item[name] for item in items])
        return batch

    def training_labels(
        self,
        studies: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(CheXpert labels as trained on (B, 14), which of them count): blank ones never do."""
        columns = [column[studies] for column in self.labels]
        labels = torch.from_numpy(np.stack(columns, 1))
        uncertain = labels == -1
        known = (labels == 0) | (labels == 1)
        if self.uncertain is not None:
            known |= uncertain
        values = torch.where(uncertain, self.uncertain or 0.0, labels.float())
        return values * known, known


def open_sets(
    index: Index,
    root: str,
    tokenizer,
    image_size: int,
    cache_gb: float,
    max_question_length: int,
    chexpert_uncertain: str,
    max_samples: int,
) -> dict[str, QuestionData]:
    """The questions of each split, {name: questions}, with one cache of images."""
    cache = open_image_cache(index, image_size, cache_gb)
    sets = {}
    for split in RELEASE_SPLITS:
        sets[split] = QuestionData(
            index, split, root, cache, tokenizer, max_question_length, chexpert_uncertain, max_samples
        )
    return sets


def note_trained_labels(sets: dict[str, QuestionData], checkpoint: dict | None) -> None:
    """Tell each split which CheXpert labels are trained: those that the checkpoint names, or of the training studies.

    A label that no study of training knows has a probability that means nothing.
    """
    known = (checkpoint or {}).get("training", {}).get("labels")
    data = sets["train"]
    if known is None and len(data):
        # part by part: of all questions together the studies would take some hundred MB
        parts = data.rows.studies() if data.count == len(data.rows) else [data.image_of()]
        studies = np.concatenate([np.unique(part) for part in parts])
        _, there = data.training_labels(studies.tolist())
        known = [label for label, any_study in zip(CHEXPERT, there.any(0).tolist(), strict=True) if any_study]
    if known is not None:
        for questions in sets.values():
            questions.trained = tuple(known)


def check_split(
    index: Index,
    split: str,
    cxr: str,
    qba: str,
) -> None:
    """InputError where a split has no questions. cxr, qba: where the releases lie."""
    if not len(index.questions(RELEASE_SPLITS[split])):
        if "table" in index.facts:
            advice = "add a column 'split', or choose other shares by --split or another --split_seed"
            raise InputError(f"{index.facts['table']}: no questions in split {split!r}; {advice}")
        advice = f"see {cxr}/mimic-cxr-2.0.0-split.csv.gz, or choose another --quality_grade"
        raise InputError(f"{qba}: no questions in split {split!r}; {advice}")


def largest_batch(batch_size: int, image_size: int, max_question_length: int) -> dict:
    """A made-up batch, on the host, of questions of the full length, each of its own image, with all labels."""
    zeros = torch.zeros(batch_size, dtype=torch.long)
    tokens = torch.zeros(batch_size, max_question_length, dtype=torch.long)
    return {
        "index": zeros,
        "head": torch.arange(batch_size) % len(HEADS),
        "target": zeros,
        "study": zeros,
        "image_of": torch.arange(batch_size),
        "image": torch.zeros(batch_size, 1, image_size, image_size, dtype=torch.uint8),
        "ids": tokens,
        "mask": torch.ones_like(tokens),
        "label": torch.zeros(batch_size, len(CHEXPERT)),
        "known": torch.ones(batch_size, len(CHEXPERT), dtype=torch.bool),
    }


def make_loader(
    data: QuestionData,
    batch_size: int,
    num_workers: int,
    prefetch_factor: int,
    questions_per_image: int = 1,
    **options,
) -> DataLoader:
    """This rank's share of some questions; options: see create_distributed_dataloader.

    questions_per_image: in training, up to so many questions of an image follow each other.
    """
    loader = create_distributed_dataloader(
        data,
        batch_size,
        num_workers=num_workers,
        collate_fn=data.collate,
        prefetch_factor=prefetch_factor if num_workers else None,
        **options,
    )
    if questions_per_image > 1:
        loader.batch_sampler.groups = ImageGroups(data.image_of(), questions_per_image)
    return loader
