"""The machinery of training: state, step, loop, checkpoints, mesh."""
