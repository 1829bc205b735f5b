//! Step noise: log-normal factors of mean 1 whose mean absolute deviation is the step model's own error.
//!
//! Drawn by Box and Muller's transform through libm, so that the bytes of a run agree between platforms.

use homing_units::{Duration, Rng, rng_for};
use rand::Rng as _;

/// The noise of one worker's steps.
#[derive(Clone, Debug)]
pub(crate) struct Noise {
    sigma: f64,
    rng: Rng,
}

impl Noise {
    /// Noise of this mean absolute error in percent; 0 is none.
    pub(crate) fn new(error_percent: f64, seed: u64, worker: &str) -> Self {
        // E|exp(sigma z - sigma^2/2) - 1| is sigma * sqrt(2/pi) for a small sigma.
        let sigma = error_percent / 100.0 * libm::sqrt(std::f64::consts::FRAC_PI_2);
        Self {
            sigma,
            rng: rng_for(seed, &format!("steps/{worker}")),
        }
    }

    /// A step's duration with noise.
    pub(crate) fn apply(&mut self, duration: Duration) -> Duration {
        if self.sigma == 0.0 {
            return duration;
        }
        let factor = libm::exp(self.sigma * self.normal() - self.sigma * self.sigma / 2.0);
        let nanos = duration.as_nanos() as f64 * factor;
        Duration::from_nanos(libm::round(nanos) as u64)
    }

    fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.unit()));
        radius * libm::cos(std::f64::consts::TAU * self.unit())
    }

    /// A random number of [0, 1).
    fn unit(&mut self) -> f64 {
        const UNIT: f64 = 1.0 / (1_u64 << 53) as f64;
        (self.rng.next_u64() >> 11) as f64 * UNIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_mean_one_and_the_models_error() {
        const DRAWS: u32 = 20_000;
        let step = Duration::from_millis(10);
        let mut noise = Noise::new(4.0, 7, "d0");
        let factors: Vec<f64> = (0..DRAWS)
            .map(|_| noise.apply(step).as_secs_f64() / step.as_secs_f64())
            .collect();
        let mean = factors.iter().sum::<f64>() / f64::from(DRAWS);
        let error = factors.iter().map(|factor| (factor - 1.0).abs()).sum::<f64>() / f64::from(DRAWS);
        assert!((mean - 1.0).abs() < 0.002, "mean {mean}");
        assert!((error - 0.04).abs() < 0.002, "mean absolute error {error}");
    }

    #[test]
    fn no_error_is_no_noise_and_workers_differ() {
        let step = Duration::from_millis(10);
        assert_eq!(Noise::new(0.0, 7, "d0").apply(step), step);
        let draw = |seed, worker| Noise::new(2.0, seed, worker).apply(step);
        assert_eq!(draw(7, "d0"), draw(7, "d0"));
        assert_ne!(draw(7, "d0"), draw(7, "d1"));
        assert_ne!(draw(7, "d0"), draw(8, "d0"));
    }
}
