//! The deterministic simulator: virtual clock, network, simulated engines, checkers.
