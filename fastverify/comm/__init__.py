"""Communication between GPUs: settings, topology rules and collectives."""
