//! A worker's speed, learnt from what its requests took: an online fit of the calibrated form.
//!
//! A duration is linear in the figures of [`Speed`] once the saturation of the experts is fixed, which is taken from the built-in
//! hardware: so many steps, experts woken, tokens, pairs, tokens of context, the front end, and of KV that is pulled a setup
//! and so many tokens. The fit is recursive least squares
//! in the ratios of each figure to its built-in value, with a ridge that holds each ratio near 1 until there is evidence, and
//! on relative errors, because a prefill takes a thousand times as long as a token. Old evidence fades, so a worker that becomes
//! slower is noticed.
//!
//! Robust: an observation's pull is bounded by the usual error (Huber), so a request that was stalled by something unseen
//! moves the fit little. Figures stay positive.
//!
//! Only what did not queue may be shown here: who decides that, and who measures, is the router. It keeps one small matrix.

use crate::speed::Speed;

/// Figures that are learnt.
const FIGURES: usize = 8;

/// How far from its built-in value a figure may be, as a variance of the ratio: hardware differs by a factor of five.
const RIDGE: f64 = 4.0;

/// No figure is known better than this, as a variance of the ratio: below it, rounding errors are larger than what is left.
const CERTAIN: f64 = 1e-8;

/// The variance of an observation's relative error that is taken for usual at first.
const FIRST_ERROR: f64 = 0.04;

/// Evidence this many observations old counts a third.
const MEMORY: f64 = 1_000.0;

/// An error of so many usual errors is bounded to this.
const HUBER: f64 = 2.0;

/// A figure's ratio to its built-in value is at least this.
const LEAST: f64 = 0.02;

/// What a duration was spent on: how often each figure counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    /// Steps.
    pub(crate) steps: f64,
    /// Experts woken, as a share, over the steps.
    pub(crate) awake: f64,
    /// Tokens.
    pub(crate) tokens: f64,
    /// Pairs of a prefilled token and a token that it attends to.
    pub(crate) pairs: f64,
    /// Tokens of context, over the steps.
    pub(crate) context: f64,
    /// Front ends passed.
    pub(crate) fronts: f64,
    /// Transfers set up.
    pub(crate) setups: f64,
    /// Tokens whose KV came over a NIC.
    pub(crate) moved: f64,
}

/// A worker's speed as far as it is known.
#[derive(Clone, Debug)]
pub(crate) struct StepFit {
    built_in: Speed,
    /// Ratios to the built-in figures.
    ratios: [f64; FIGURES],
    /// Their covariance.
    covariance: [[f64; FIGURES]; FIGURES],
    /// The mean square of relative errors.
    usual_error: f64,
    seen: u32,
}

impl Work {
    /// A prefill of so many tokens and pairs, first its front end, beside a batch that decodes.
    pub(crate) fn prefill(speed: &Speed, tokens: f64, pairs: f64, batch: f64, context: f64) -> Self {
        let steps = speed.steps(tokens.max(1.0), batch);
        Self {
            steps,
            awake: steps * (1.0 - libm::exp(-speed.wake * (tokens / steps + batch))),
            tokens: tokens + steps * batch,
            pairs,
            context: steps * context,
            fronts: 1.0,
            ..Self::default()
        }
    }

    /// Pulling the KV of so many tokens, and the step that gives the first token, beside a batch that decodes.
    pub(crate) fn pull(speed: &Speed, moved: f64, batch: f64, context: f64) -> Self {
        Self {
            setups: 1.0,
            moved,
            ..Self::prefill(speed, 1.0, 0.0, batch, context)
        }
    }

    /// So many tokens of an answer in a batch.
    pub(crate) fn decode(speed: &Speed, tokens: f64, batch: f64, context: f64) -> Self {
        Self {
            steps: tokens,
            awake: tokens * (1.0 - libm::exp(-speed.wake * batch)),
            tokens: tokens * batch,
            pairs: 0.0,
            context: tokens * context,
            ..Self::default()
        }
    }

    /// The same with the prefill of others beside it: so many tokens and pairs of so many legs. Each leg's steps would have
    /// been steps anyway; what they add is their tokens and the experts that these wake.
    pub(crate) fn beside(self, speed: &Speed, tokens: f64, pairs: f64, legs: f64) -> Self {
        if legs <= 0.0 || self.steps <= 0.0 {
            return self;
        }
        let steps = speed.steps(tokens / legs, 0.0).max(1.0) * legs;
        let asleep = 1.0 - (self.awake / self.steps).min(1.0);
        let wakes = 1.0 - libm::exp(-speed.wake * tokens / steps);
        Self {
            awake: self.awake + steps * asleep * wakes,
            tokens: self.tokens + tokens,
            pairs: self.pairs + pairs,
            ..self
        }
    }

    const fn counts(&self) -> [f64; FIGURES] {
        [
            self.steps,
            self.awake,
            self.tokens,
            self.pairs,
            self.context,
            self.fronts,
            self.setups,
            self.moved,
        ]
    }
}

const fn figures(speed: &Speed) -> [f64; FIGURES] {
    [
        speed.base_s,
        speed.experts_s,
        speed.token_s,
        speed.pair_s,
        speed.context_s,
        speed.front_s,
        speed.setup_s,
        speed.moved_token_s,
    ]
}

impl StepFit {
    /// Nothing is known yet: the built-in figures hold.
    pub(crate) fn new(built_in: Speed) -> Self {
        let mut covariance = [[0.0; FIGURES]; FIGURES];
        for (index, row) in covariance.iter_mut().enumerate() {
            row[index] = RIDGE;
        }
        Self {
            built_in,
            ratios: [1.0; FIGURES],
            covariance,
            usual_error: FIRST_ERROR,
            seen: 0,
        }
    }

    /// Nothing is known yet of a worker among others that are known: it is taken to be like them until it shows otherwise.
    pub(crate) fn like(others: &Self) -> Self {
        Self {
            ratios: others.ratios,
            ..Self::new(others.built_in)
        }
    }

    /// The worker's speed as far as it is known.
    pub(crate) fn speed(&self) -> Speed {
        let [
            base_s,
            experts_s,
            token_s,
            pair_s,
            context_s,
            front_s,
            setup_s,
            moved_token_s,
        ] = std::array::from_fn(|index| figures(&self.built_in)[index] * self.ratios[index]);
        Speed {
            base_s,
            experts_s,
            token_s,
            pair_s,
            context_s,
            front_s,
            setup_s,
            moved_token_s,
            ..self.built_in
        }
    }

    /// Observations so far.
    pub(crate) const fn seen(&self) -> u32 {
        self.seen
    }

    /// The usual relative error of a prediction.
    pub(crate) fn usual_error(&self) -> f64 {
        libm::sqrt(self.usual_error)
    }

    /// By what share of what was measured its prediction for this work errs; `None` where nothing was done or it took no time.
    pub(crate) fn error(&self, work: &Work, seconds: f64) -> Option<f64> {
        let (figures, counts) = (figures(&self.built_in), work.counts());
        let predicted: f64 = (0..FIGURES)
            .map(|index| counts[index] * figures[index] * self.ratios[index])
            .sum();
        (seconds > 0.0 && predicted > 0.0).then(|| 1.0 - predicted / seconds)
    }

    /// This work took so many seconds.
    pub(crate) fn learn(&mut self, work: &Work, seconds: f64) {
        let Some(error) = self.error(work, seconds) else {
            return;
        };
        let (figures, counts) = (figures(&self.built_in), work.counts());
        // Relative to what was measured, so that all durations weigh the same.
        let row: [f64; FIGURES] = std::array::from_fn(|index| counts[index] * figures[index] / seconds);
        let bound = HUBER * libm::sqrt(self.usual_error);
        let pull = error.clamp(-bound, bound);
        self.step(&row, pull);
        self.usual_error += (pull * pull - self.usual_error) / (f64::from(self.seen.min(100)) + 2.0);
        self.usual_error = self.usual_error.max(1e-4);
        self.seen = self.seen.saturating_add(1);
    }

    /// One step of recursive least squares.
    fn step(&mut self, row: &[f64; FIGURES], pull: f64) {
        let spread: [f64; FIGURES] = std::array::from_fn(|index| {
            (0..FIGURES)
                .map(|other| self.covariance[index][other] * row[other])
                .sum()
        });
        let explained: f64 = (0..FIGURES).map(|index| row[index] * spread[index]).sum();
        let whole = self.usual_error + explained;
        for (ratio, spread) in self.ratios.iter_mut().zip(&spread) {
            *ratio += spread / whole * pull;
        }
        for (index, line) in self.covariance.iter_mut().enumerate() {
            for (value, other) in line.iter_mut().zip(&spread) {
                *value -= spread[index] * other / whole;
            }
            // What is known fades, and what is not observed does not become unknown without bound. The variance alone grows: were what
            // the figures have to do with each other to grow beside a variance that is bounded, this would be a covariance no longer.
            let variance = &mut line[index];
            *variance = (*variance * (1.0 + 1.0 / MEMORY)).clamp(CERTAIN, RIDGE);
        }
        self.stay_positive();
    }

    /// Brings each ratio to its least at least, and the others with it, as far as they hang together: the likeliest figures of those
    /// that are possible. To cut the one alone would leave the others what they had been given to make up for it, step after step.
    fn stay_positive(&mut self) {
        for _ in 0..FIGURES {
            let low = (0..FIGURES).find(|&index| self.ratios[index] < LEAST && self.covariance[index][index] > 0.0);
            let Some(low) = low else { break };
            let shift = (LEAST - self.ratios[low]) / self.covariance[low][low];
            for (ratio, line) in self.ratios.iter_mut().zip(&self.covariance) {
                *ratio += line[low] * shift;
            }
            self.ratios[low] = LEAST;
        }
        for ratio in &mut self.ratios {
            *ratio = ratio.max(LEAST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::{Rng, rng_for};
    use rand::RngExt as _;

    /// Hardware that nobody told the router about: how long a step of m tokens, A pairs and C tokens of context takes.
    type Truth = fn(f64, f64, f64) -> f64;

    fn h20(tokens: f64, pairs: f64, context: f64) -> f64 {
        Speed::of("h20").expect("known").step_s(tokens, pairs, context)
    }

    /// Dense models: no experts, a smooth maximum of loading weights and computing. From the calibration.
    fn dense(base: f64, token: f64, pair: f64, context_s: f64, [tokens, pairs, context]: [f64; 3]) -> f64 {
        let compute = token * tokens;
        (libm::cbrt(base * base * base + compute * compute * compute) + pair * pairs + context_s * context + 0.7) / 1e3
    }

    fn llama_8b(tokens: f64, pairs: f64, context: f64) -> f64 {
        dense(6.684, 0.021_137, 7.917e-7, 4.229e-5, [tokens, pairs, context])
    }

    fn qwen_32b(tokens: f64, pairs: f64, context: f64) -> f64 {
        dense(13.865, 0.052_667, 1.5929e-6, 4.248e-5, [tokens, pairs, context])
    }

    /// A request of an agent: its work as the router sees it, and what it took.
    fn observed(truth: Truth, rng: &mut Rng) -> (Work, f64, Work, f64) {
        let speed = Speed::default();
        let draw = |rng: &mut Rng, low: f64, high: f64| low * libm::pow(high / low, rng.random::<f64>());
        let (prompt, batch) = (draw(rng, 2_000.0, 120_000.0), draw(rng, 1.0, 24.0).floor());
        let tail = draw(rng, 100.0, prompt);
        let (pairs, context) = (tail * (prompt - tail / 2.0), batch * 30_000.0);
        let steps = (tail / (8_192.0 - batch)).ceil();
        let noise = |rng: &mut Rng| 1.0 + 0.1 * (rng.random::<f64>() - 0.5);
        let first_s = 0.025 + steps * truth(tail / steps + batch, pairs / steps, context);
        let (answer, batch) = (draw(rng, 20.0, 900.0), batch + 1.0);
        let rest_s = answer * truth(batch, 0.0, context + prompt);
        (
            Work::prefill(&speed, tail, pairs, batch - 1.0, context),
            first_s * noise(rng),
            Work::decode(&speed, answer, batch, context + prompt),
            rest_s * noise(rng),
        )
    }

    fn predicted(speed: &Speed, work: &Work) -> f64 {
        work.counts()
            .iter()
            .zip(figures(speed))
            .map(|(count, figure)| count * figure)
            .sum()
    }

    /// The median error of predicted first tokens after 200 requests, one in `outliers` of which took four times as long.
    fn median_error(truth: Truth, outliers: u32) -> f64 {
        let mut rng = rng_for(7, "steps");
        let mut fit = StepFit::new(Speed::default());
        for request in 0..200 {
            let (first, first_s, rest, rest_s) = observed(truth, &mut rng);
            let stalled = outliers > 0 && request % outliers == 0;
            fit.learn(&first, first_s * if stalled { 4.0 } else { 1.0 });
            fit.learn(&rest, rest_s);
        }
        let mut errors: Vec<f64> = (0..501)
            .map(|_| {
                let (first, first_s, ..) = observed(truth, &mut rng);
                (predicted(&fit.speed(), &first) / first_s - 1.0).abs()
            })
            .collect();
        errors.sort_by(f64::total_cmp);
        errors[250]
    }

    #[test]
    fn two_hundred_requests_tell_hardware_that_nobody_named() {
        for (name, truth) in [
            ("h20", h20 as Truth),
            ("llama 8b", llama_8b),
            ("qwen 32b on two", qwen_32b),
        ] {
            let before = {
                let (mut rng, speed) = (rng_for(7, "steps"), Speed::default());
                let (first, first_s, ..) = observed(truth, &mut rng);
                (predicted(&speed, &first) / first_s - 1.0).abs()
            };
            let (clean, stalled) = (median_error(truth, 0), median_error(truth, 10));
            assert!(clean <= 0.10, "{name}: {clean}, before {before}");
            assert!(stalled <= 0.20, "{name} with outliers: {stalled}, before {before}");
        }
    }

    /// A figure that the hardware does not have wants to be less than nothing. It must not drive the others away in ever so many steps.
    #[test]
    fn a_figure_that_is_not_there_leaves_the_others_right() {
        let (mut rng, speed) = (rng_for(11, "absent"), Speed::default());
        let mut fit = StepFit::new(speed);
        let tail = |rng: &mut Rng| {
            let tokens = 50.0 + 450.0 * rng.random::<f64>();
            let pairs = tokens * 20_000.0;
            let seconds = 0.025 + llama_8b(tokens + 1.0, pairs, 20_000.0);
            (Work::prefill(&speed, tokens, pairs, 1.0, 20_000.0), seconds)
        };
        for _ in 0..4_000 {
            let (work, seconds) = tail(&mut rng);
            fit.learn(&work, seconds * (0.95 + 0.1 * rng.random::<f64>()));
            let answer = 10.0 + 90.0 * rng.random::<f64>();
            let seconds = answer * llama_8b(2.0, 0.0, 40_000.0);
            fit.learn(&Work::decode(&speed, answer, 2.0, 40_000.0), seconds);
        }
        for _ in 0..20 {
            let (work, seconds) = tail(&mut rng);
            let found = predicted(&fit.speed(), &work);
            assert!(
                (found / seconds - 1.0).abs() < 0.1,
                "{found} s, it takes {seconds} s: {:?}",
                fit.ratios
            );
        }
    }

    #[test]
    fn a_slow_network_is_found_out_from_what_is_pulled() {
        let mut rng = rng_for(5, "network");
        let (truth, told) = (Speed::of("h20").expect("known"), Speed::default());
        let (setup_s, moved_token_s) = (0.120, 3.0 * told.moved_token_s);
        let mut fit = StepFit::new(told);
        let pulled = |rng: &mut Rng| {
            let moved = 500.0 * libm::pow(200.0, rng.random::<f64>());
            let seconds = 0.025 + setup_s + moved * moved_token_s + truth.step_s(5.0, 0.0, 1e5);
            (Work::pull(&told, moved, 4.0, 1e5), seconds)
        };
        for _ in 0..200 {
            let (work, seconds) = pulled(&mut rng);
            fit.learn(&work, seconds * (0.95 + 0.1 * rng.random::<f64>()));
        }
        let (work, seconds) = pulled(&mut rng);
        let found = predicted(&fit.speed(), &work);
        assert!((found / seconds - 1.0).abs() < 0.1, "{found} s, it takes {seconds} s");
        let speed = fit.speed();
        let per_token = speed.moved_token_s / moved_token_s;
        assert!((0.7..1.3).contains(&per_token), "{per_token} of what a token takes");
    }

    #[test]
    fn one_among_known_others_is_like_them_until_it_shows_otherwise() {
        let mut others = StepFit::new(Speed::default());
        let mut rng = rng_for(9, "others");
        for _ in 0..100 {
            let (first, first_s, rest, rest_s) = observed(qwen_32b, &mut rng);
            others.learn(&first, first_s);
            others.learn(&rest, rest_s);
        }
        let mut one = StepFit::like(&others);
        assert_eq!((one.speed(), one.seen()), (others.speed(), 0));
        let (first, ..) = observed(qwen_32b, &mut rng);
        let usual_s = predicted(&others.speed(), &first);
        for _ in 0..30 {
            one.learn(&first, 3.0 * usual_s);
        }
        let found = predicted(&one.speed(), &first) / usual_s;
        assert!((2.5..3.5).contains(&found), "{found} times as slow, it is three times");
    }

    #[test]
    fn nothing_seen_leaves_the_built_in_figures_and_nonsense_changes_nothing() {
        let mut fit = StepFit::new(Speed::default());
        assert_eq!(fit.speed(), Speed::default());
        fit.learn(&Work::default(), 1.0);
        fit.learn(&Work::decode(&Speed::default(), 10.0, 1.0, 0.0), 0.0);
        assert_eq!((fit.speed(), fit.seen()), (Speed::default(), 0));
    }

    #[test]
    fn figures_stay_positive_and_finite_whatever_is_seen() {
        let mut fit = StepFit::new(Speed::default());
        let mut rng = rng_for(3, "nonsense");
        for _ in 0..20_000 {
            let work = Work::prefill(&Speed::default(), 1.0 + 9_000.0 * rng.random::<f64>(), 1e9, 3.0, 1e5);
            fit.learn(&work, libm::exp(40.0 * (rng.random::<f64>() - 0.5)));
        }
        let speed = fit.speed();
        assert!(
            figures(&speed).iter().all(|figure| figure.is_finite() && *figure > 0.0),
            "{speed:?}"
        );
    }
}
