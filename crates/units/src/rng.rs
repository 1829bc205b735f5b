//! Randomness is an argument: each component gets its own generator, made from the run's seed and the component's name.

use rand::SeedableRng;

/// The project's generator: small, fast, and the same on every platform.
pub type Rng = rand_pcg::Pcg64Mcg;

/// A generator for one component. The same `(seed, component)` gives the same numbers in every run, and two components
/// of one run do not share a stream, so that adding a draw in one leaves the others as they were.
#[must_use]
pub fn rng_for(seed: u64, component: &str) -> Rng {
    // FNV-1a spreads the name over the seed; the generator's own seeding mixes it further.
    let mixed = component.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    Rng::seed_from_u64(mixed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::Rng as _;

    #[test]
    fn a_component_has_its_own_stream() {
        let draw = |seed, name| rng_for(seed, name).next_u64();
        assert_eq!(draw(1, "steps"), draw(1, "steps"));
        assert_ne!(draw(1, "steps"), draw(1, "network"));
        assert_ne!(draw(1, "steps"), draw(2, "steps"));
    }
}
