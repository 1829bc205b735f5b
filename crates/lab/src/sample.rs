//! A figure of ours: one value a run, and what may be said of it.
//!
//! The mean has a 95% bootstrap interval, and two figures differ only where their intervals do not touch.

use homing_report::MetricSummary;

/// One value a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The values, by seed. A run without the figure (a TTFT of no request) has no value here.
    pub values: Vec<f64>,
    summary: Option<MetricSummary>,
}

impl Sample {
    /// The sample of these values.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = Option<f64>>) -> Self {
        let values: Vec<f64> = values.into_iter().flatten().collect();
        Self {
            summary: MetricSummary::of("lab", &values),
            values,
        }
    }

    /// The mean; `None` where no run has the figure.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        self.summary.map(|summary| summary.mean)
    }

    /// The 95% interval of the mean; `None` below two runs.
    #[must_use]
    pub fn interval(&self) -> Option<[f64; 2]> {
        self.summary.and_then(|summary| summary.ci95)
    }

    /// The largest value by the smallest; `None` of nothing, and where the smallest is 0.
    #[must_use]
    pub fn spread(&self) -> Option<f64> {
        let [smallest, largest] = self.range()?;
        (smallest > 0.0).then(|| largest / smallest)
    }

    /// The smallest and the largest value; `None` of nothing.
    #[must_use]
    pub fn range(&self) -> Option<[f64; 2]> {
        let smallest = self.values.iter().copied().min_by(f64::total_cmp)?;
        let largest = self.values.iter().copied().max_by(f64::total_cmp)?;
        Some([smallest, largest])
    }

    /// Whether the intervals of both do not touch. One value alone is distinguishable from nothing.
    #[must_use]
    pub fn differs_from(&self, other: &Self) -> bool {
        match (self.interval(), other.interval()) {
            (Some([low, high]), Some([other_low, other_high])) => high < other_low || other_high < low,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(values: &[f64]) -> Sample {
        Sample::of(values.iter().copied().map(Some))
    }

    #[test]
    fn intervals_decide_what_differs() {
        assert!(sample(&[1.0, 1.1, 1.2]).differs_from(&sample(&[2.0, 2.1, 2.2])));
        assert!(!sample(&[1.0, 1.1, 3.0]).differs_from(&sample(&[2.0, 2.1, 2.2])));
        assert!(!sample(&[1.0]).differs_from(&sample(&[2.0])), "one run proves nothing");
    }

    #[test]
    fn runs_without_the_figure_are_left_out() {
        let some = Sample::of([Some(1.0), None, Some(3.0)]);
        assert_eq!((some.mean(), some.spread()), (Some(2.0), Some(3.0)));
        let none = Sample::of([None, None]);
        assert_eq!((none.mean(), none.spread(), none.interval()), (None, None, None));
        assert_eq!(sample(&[0.0, 4.0]).spread(), None);
        assert_eq!(sample(&[2.0, 9.0, 1.0]).range(), Some([1.0, 9.0]));
    }
}
