"""What all stages of guide 3's cascade share in a run."""

from argparse import Namespace
from dataclasses import dataclass, field

import torch

from tasks.cascade.agreement import prior_of
from tasks.cascade.data import Data, learn_prior
from tasks.cascade.diffusion import Diffusion, make_diffusion
from tasks.cascade.model import StageNet
from tasks.cascade.report import comparable_facts, read_regression
from tasks.cascade.sampling import Trained
from tasks.cascade.views import views_of


@dataclass
class Setup:
    """What all stages of a run share. models: the averaged ones of the stages that are trained.

    data: None where a step is only tried. best_step: of the checkpoint that the last of the models is from. regression:
    the test scores, by name, of the run of --regression_run.
    """

    args: Namespace
    device: torch.device
    precision: str
    data: Data | None = None
    accelerator: object = None
    models: list[StageNet] = field(default_factory=list)
    best_step: int = 0
    regression: dict[str, float] = field(default_factory=dict)
    regression_size: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.diffusion: Diffusion = make_diffusion(vars(self.args), self.device)
        # what moves up in a CT does not move alike in the image of a cone
        views = views_of(self.args.views)
        self.moved = all(view.parallel for view in views)

    def cascade(self, stages: int | None = None) -> Trained:
        """The stages that are trained, or so many of them."""
        models = self.models[:stages]
        configs = self.args.stage_configs[: len(models)]
        names = [config["name"] for config in configs]
        return Trained(models, names, self.diffusion, self.precision)

    def take_prior(self, checkpoint: dict | None) -> None:
        """All ranks: let the first stage start from what a checkpoint knows, or else the training patients tell."""
        if checkpoint:
            prior = prior_of(checkpoint)
        else:
            size = self.args.stage_configs[0]["volume_size"]
            prior = learn_prior(
                self.data.set("train", size),
                self.data.greys,
                self.args.xray_agreement,
                self.device,
            )
        self.diffusion = self.diffusion.starting_from(prior)
        if self.data:
            self.data.greys = prior.greys

    def take_regression(self, size: list[int] | tuple[int, ...]) -> None:
        """All ranks: the scores of --regression_run, if it was tested on this run's patients and last grid."""
        self.regression_size = list(size)
        facts = comparable_facts(self.data, self.args.views, self.regression_size)
        self.regression = read_regression(self.args.regression_run, facts)

    def regression_beside(self, split: str) -> dict[str, float]:
        """The scores of --regression_run that stand beside those of a split's patients, on the same grid."""
        size = list(self.models[-1].size)
        if split != "test" or size != self.regression_size:
            return {}
        return self.regression
