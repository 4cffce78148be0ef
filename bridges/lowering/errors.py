"""What lowering refuses, each with what it found and what to do."""


class LoweringError(ValueError):
    """A torch module that cannot become a JAX function as it is."""


class LoweringExportError(LoweringError):
    """`torch.export` could not turn the module into one graph."""


class MissingOpsError(LoweringError):
    """The graph calls torch ops that have no JAX counterpart here."""


class LoweringShapeError(LoweringError):
    """A value came out with another shape than torch gives it."""


class LoweringParityError(LoweringError):
    """The lowered function and torch disagree on the same inputs."""
