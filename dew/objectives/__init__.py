"""What a run optimises: the contract of `dew.objectives.base`, and its objectives."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.objectives.balanced_moe import BalancedLM
    from dew.objectives.barlow_twins import BarlowTwins
    from dew.objectives.base import (
        Aux,
        EMASpec,
        InputSpec,
        Mean,
        Metric,
        Objective,
        Prediction,
        Step,
        everything,
        freeze,
        mean_loss,
        merge,
        scalar_loss,
        select,
        thaw,
        under,
    )
    from dew.objectives.causal_lm import CausalLM
    from dew.objectives.jepa import JEPA
    from dew.objectives.masked_lm import IGNORED, MaskedLM
    from dew.objectives.metrics import (
        Accuracy,
        MeanLoss,
        NatsPerToken,
        Perplexity,
        TokenCount,
        token_metrics,
    )
    from dew.objectives.model import ModelObjective
    from dew.objectives.router_loss import RouterLossLM
    from dew.objectives.seq2seq_lm import Seq2SeqLM
    from dew.objectives.supervised import Supervised

__all__ = [
    "IGNORED",
    "JEPA",
    "Accuracy",
    "Aux",
    "BalancedLM",
    "BarlowTwins",
    "CausalLM",
    "EMASpec",
    "InputSpec",
    "MaskedLM",
    "Mean",
    "MeanLoss",
    "Metric",
    "ModelObjective",
    "NatsPerToken",
    "Objective",
    "Perplexity",
    "Prediction",
    "RouterLossLM",
    "Seq2SeqLM",
    "Step",
    "Supervised",
    "TokenCount",
    "everything",
    "freeze",
    "mean_loss",
    "merge",
    "scalar_loss",
    "select",
    "thaw",
    "token_metrics",
    "under",
]
