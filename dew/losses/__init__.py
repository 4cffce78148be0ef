"""Loss terms as pure functions of scores: divergences, matching of states, presets."""
