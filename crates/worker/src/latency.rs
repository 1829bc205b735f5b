//! How long requests take, as histograms in vLLM's buckets.

use homing_units::{Duration, Instant};

/// Upper bounds in seconds; the last bucket has none.
pub const BOUNDS: [f64; 20] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0,
];

/// Durations that were observed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Observations up to each bound and above the one before, then those above the last.
    counts: [u64; BOUNDS.len() + 1],
    seconds: f64,
}

impl Histogram {
    /// Counts one.
    pub fn observe(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        self.counts[BOUNDS.partition_point(|bound| *bound < seconds)] += 1;
        self.seconds += seconds;
    }

    /// Observations up to each bound, those up to smaller ones included.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let mut sum = 0;
        BOUNDS.iter().zip(self.counts).map(move |(bound, count)| {
            sum += count;
            (*bound, sum)
        })
    }

    /// All observations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.seconds
    }
}

/// What requests took, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latencies {
    /// From submission to the first token.
    pub first_token: Histogram,
    /// From one token to the next.
    pub between_tokens: Histogram,
    /// From submission to the end, of requests that ended well.
    pub whole: Histogram,
    /// Pulls that ended well.
    pub pull: Histogram,
}

/// The moments of one request.
#[derive(Clone, Copy, Debug)]
pub struct Moments {
    submitted: Instant,
    last_token: Option<Instant>,
    pull_begun: Option<Instant>,
}

impl Moments {
    /// A request that is submitted now.
    #[must_use]
    pub fn begin(now: Instant) -> Self {
        Self {
            submitted: now,
            last_token: None,
            pull_begun: None,
        }
    }

    /// It got a token.
    pub fn token(&mut self, now: Instant, latencies: &mut Latencies) {
        match self.last_token.replace(now) {
            None => latencies.first_token.observe(now - self.submitted),
            Some(before) => latencies.between_tokens.observe(now - before),
        }
    }

    /// It ended well.
    pub fn end(&self, now: Instant, latencies: &mut Latencies) {
        latencies.whole.observe(now - self.submitted);
    }

    /// Its pull begins.
    pub fn begin_pull(&mut self, now: Instant) {
        self.pull_begun = Some(now);
    }

    /// Its pull ended well.
    pub fn end_pull(&mut self, now: Instant, latencies: &mut Latencies) {
        if let Some(begun) = self.pull_begun.take() {
            latencies.pull.observe(now - begun);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_falls_into_the_bucket_that_holds_it() {
        let check = |millis: u64, first: f64| {
            let mut histogram = Histogram::default();
            histogram.observe(Duration::from_millis(millis));
            let bucket = histogram
                .cumulative()
                .find(|(_, count)| *count == 1)
                .map(|(bound, _)| bound);
            assert_eq!(bucket.unwrap_or(f64::INFINITY), first, "{millis} ms");
            assert_eq!((histogram.count(), histogram.seconds()), (1, millis as f64 / 1e3));
        };
        check(0, 0.001);
        check(1, 0.001);
        check(2, 0.0025);
        check(100, 0.1);
        check(101, 0.25);
        check(160_000, 160.0);
        check(160_001, f64::INFINITY);
    }

    #[test]
    fn a_request_has_one_first_token() {
        let at = |millis| Instant::ZERO + Duration::from_millis(millis);
        let (mut moments, mut latencies) = (Moments::begin(at(10)), Latencies::default());
        moments.begin_pull(at(12));
        moments.end_pull(at(20), &mut latencies);
        moments.end_pull(at(21), &mut latencies);
        [30, 35, 41]
            .into_iter()
            .for_each(|millis| moments.token(at(millis), &mut latencies));
        moments.end(at(41), &mut latencies);
        assert_eq!((latencies.pull.count(), latencies.pull.seconds()), (1, 0.008));
        assert_eq!(
            (latencies.first_token.count(), latencies.first_token.seconds()),
            (1, 0.02)
        );
        assert_eq!(
            (latencies.between_tokens.count(), latencies.between_tokens.seconds()),
            (2, 0.011)
        );
        assert_eq!((latencies.whole.count(), latencies.whole.seconds()), (1, 0.031));
    }
}
