"""Loss terms as pure functions of scores; they know no trainer and no objective.

Divergences between a teacher's and a student's distributions, matching of hidden
states and attention maps, cross-entropies, and the presets of other projects.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.losses.chunking import (
        CrossTokenizerScores,
        LazyLogits,
        MaterialisedScores,
        ScoreSource,
        term_sums,
        whole_scores,
    )
    from dew.losses.cross_entropy import next_token_losses, next_tokens, token_losses
    from dew.losses.diagnostics import (
        Agreement,
        EntropyGap,
        MassOnTop,
        TeacherCrossEntropy,
    )
    from dew.losses.divergences import (
        TVD,
        CrossEntropy,
        ForwardKL,
        ReverseKL,
        Sampled,
        ScaledJSD,
        SkewKL,
        SoftCrossEntropy,
        TopKTail,
    )
    from dew.losses.hidden_states import (
        AttentionMap,
        HiddenCosine,
        HiddenMSE,
        Relation,
        StateTerm,
        even_layers,
    )
    from dew.losses.policy_gradient import PolicyGradient
    from dew.losses.presets import (
        distillkit,
        liger,
        maxtext,
        minillm,
        torchtune,
        trl_gkd,
    )
    from dew.losses.scores import (
        DenseScores,
        OwnProbabilities,
        PairedScores,
        Scores,
        SoftTargets,
    )
    from dew.losses.sparse_scores import SampledScores, TopKScores
    from dew.losses.student_loss import StudentLoss
    from dew.losses.supervised import Classification, Regression
    from dew.losses.term import LossInputs, Schedule, StateInputs, Term, TermInputs
    from dew.losses.uld import ULD
    from dew.losses.vocabulary import VocabularyMap, align

__all__ = [
    "TVD",
    "ULD",
    "Agreement",
    "AttentionMap",
    "Classification",
    "CrossEntropy",
    "CrossTokenizerScores",
    "DenseScores",
    "EntropyGap",
    "ForwardKL",
    "HiddenCosine",
    "HiddenMSE",
    "LazyLogits",
    "LossInputs",
    "MassOnTop",
    "MaterialisedScores",
    "OwnProbabilities",
    "PairedScores",
    "PolicyGradient",
    "Regression",
    "Relation",
    "ReverseKL",
    "Sampled",
    "SampledScores",
    "ScaledJSD",
    "Schedule",
    "ScoreSource",
    "Scores",
    "SkewKL",
    "SoftCrossEntropy",
    "SoftTargets",
    "StateInputs",
    "StateTerm",
    "StudentLoss",
    "TeacherCrossEntropy",
    "Term",
    "TermInputs",
    "TopKScores",
    "TopKTail",
    "VocabularyMap",
    "align",
    "distillkit",
    "even_layers",
    "liger",
    "maxtext",
    "minillm",
    "next_token_losses",
    "next_tokens",
    "term_sums",
    "token_losses",
    "torchtune",
    "trl_gkd",
    "whole_scores",
]
