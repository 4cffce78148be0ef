"""How a run proceeds: step, loop, checkpoints, optimizers, sharding, trackers."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.processes import (
        ProcessError,
        agree_process_phase,
        connect_processes,
        process_phase,
    )
    from dew.training.callbacks import Callback
    from dew.training.checkpoint import Checkpoints, DamagedCheckpointError, Keep
    from dew.training.evaluation import Evaluation
    from dew.training.logs import Commit, Log, TrainingError
    from dew.training.optimizers import OPTIMIZERS, adafactor, adamw, lion, muon, sgd
    from dew.training.progress import Progress
    from dew.training.schedules import SCHEDULES, constant, cosine, linear, wsd
    from dew.training.sharding import make_mesh, place_batch, shardings_of
    from dew.training.step import TrainStep
    from dew.training.throughput import (
        Meter,
        flops_per_token,
        peak_flops,
        peak_memory_bytes,
    )
    from dew.training.trackers import (
        JSONL,
        TRACKERS,
        TensorBoard,
        Tracker,
        Trackio,
        WandB,
    )
    from dew.training.trainer import Trainer

__all__ = [
    "JSONL",
    "OPTIMIZERS",
    "SCHEDULES",
    "TRACKERS",
    "Callback",
    "Checkpoints",
    "Commit",
    "DamagedCheckpointError",
    "Evaluation",
    "Keep",
    "Log",
    "Meter",
    "ProcessError",
    "Progress",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "TrainStep",
    "Trainer",
    "TrainingError",
    "WandB",
    "adafactor",
    "adamw",
    "agree_process_phase",
    "connect_processes",
    "constant",
    "cosine",
    "flops_per_token",
    "linear",
    "lion",
    "make_mesh",
    "muon",
    "peak_flops",
    "peak_memory_bytes",
    "place_batch",
    "process_phase",
    "sgd",
    "shardings_of",
    "wsd",
]
