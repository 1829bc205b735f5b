//! What a comparison says, computed from the figures and never written by hand.
//!
//! An expectation is set with the row, before the runs; the verdict follows from the means. Where two of our own figures are
//! ordered the intervals decide whether the order stands or is only that of the means.

use crate::sample::Sample;

/// What a row expects of our mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expect {
    /// It is within this share of the paper's figure: 0.25 is 25%.
    Within(f64),
    /// It is at most this factor above or below the paper's figure.
    Factor(f64),
    /// It is at least this.
    AtLeast(f64),
    /// It is at most this.
    AtMost(f64),
    /// It is stated, and nothing is expected of it.
    Nothing,
}

/// What the figures say.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Our mean is within this share of the paper's.
    Within(f64),
    /// The figures are in the paper's order; `uncertain` lists neighbours whose intervals touch.
    OrderHolds {
        /// Pairs that cannot be told apart, as `a / b`.
        uncertain: Vec<String>,
    },
    /// What was expected in shape is there.
    ShapeHolds,
    /// It is not.
    DoesNotReproduce,
    /// Nothing was expected.
    Reported,
}

impl Verdict {
    /// The verdict on our figure beside the paper's.
    #[must_use]
    pub fn of(expect: Expect, paper: Option<f64>, ours: &Sample) -> Self {
        if expect == Expect::Nothing {
            return Self::Reported;
        }
        let Some(mean) = ours.mean() else {
            return Self::DoesNotReproduce;
        };
        match expect {
            Expect::Within(share) => match paper {
                // Nothing is within a share of 0 but 0.
                Some(paper) if (mean - paper).abs() <= share * paper.abs() => Self::Within(share),
                _ => Self::DoesNotReproduce,
            },
            Expect::Factor(factor) => {
                Self::shape(paper.is_some_and(|paper| mean > 0.0 && mean <= paper * factor && mean * factor >= paper))
            }
            Expect::AtLeast(bound) => Self::shape(mean >= bound),
            Expect::AtMost(bound) => Self::shape(mean <= bound),
            Expect::Nothing => Self::Reported,
        }
    }

    /// The verdict on something that holds or does not.
    #[must_use]
    pub const fn shape(holds: bool) -> Self {
        if holds {
            Self::ShapeHolds
        } else {
            Self::DoesNotReproduce
        }
    }

    /// The verdict on figures that should fall from the first to the last.
    #[must_use]
    pub fn falling(figures: &[(&str, &Sample)]) -> Self {
        let mut uncertain = Vec::new();
        for pair in figures.windows(2) {
            let ((name, above), (next, below)) = (pair[0], pair[1]);
            match (above.mean(), below.mean()) {
                (Some(above_mean), Some(below_mean)) if above_mean > below_mean => {
                    if !above.differs_from(below) {
                        uncertain.push(format!("{name} / {next}"));
                    }
                }
                _ => return Self::DoesNotReproduce,
            }
        }
        Self::OrderHolds { uncertain }
    }

    /// Whether what was expected is there.
    #[must_use]
    pub const fn holds(&self) -> bool {
        !matches!(self, Self::DoesNotReproduce)
    }

    /// The verdict in words.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::Within(share) => format!("within {:.0}%", share * 100.0),
            Self::OrderHolds { uncertain } if uncertain.is_empty() => "order holds".to_owned(),
            Self::OrderHolds { uncertain } => {
                format!("order holds, not distinguishable: {}", uncertain.join(", "))
            }
            Self::ShapeHolds => "shape holds".to_owned(),
            Self::DoesNotReproduce => "**does not reproduce**".to_owned(),
            Self::Reported => "reported".to_owned(),
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
    fn one_figure_beside_the_papers() {
        let check = |expect: Expect, paper: f64, ours: &[f64], expected: &str| {
            assert_eq!(
                Verdict::of(expect, Some(paper), &sample(ours)).words(),
                expected,
                "{expect:?} of {paper} with {ours:?}"
            );
        };
        const NOT: &str = "**does not reproduce**";
        check(Expect::Within(0.25), 1.0, &[1.2, 1.3], "within 25%");
        check(Expect::Within(0.25), 1.0, &[0.74], NOT);
        check(Expect::Within(0.25), 0.0, &[0.0], "within 25%");
        check(Expect::Within(0.25), 0.0, &[1.0], NOT);
        check(Expect::Factor(3.0), 100.0, &[34.0], "shape holds");
        check(Expect::Factor(3.0), 100.0, &[301.0], NOT);
        check(Expect::Factor(3.0), 100.0, &[33.0], NOT);
        check(Expect::Factor(3.0), 0.0, &[0.0], NOT);
        check(Expect::AtLeast(1.5), 2.0, &[1.5], "shape holds");
        check(Expect::AtLeast(1.5), 2.0, &[1.49], NOT);
        check(Expect::AtMost(50.0), 50.0, &[50.1], NOT);
        check(Expect::Nothing, 1.0, &[9.0], "reported");
        check(Expect::AtMost(1.0), 1.0, &[], NOT);
    }

    #[test]
    fn an_order_stands_only_where_intervals_do_not_touch() {
        let check = |figures: &[&[f64]], expected: &str| {
            let samples: Vec<Sample> = figures.iter().map(|values| sample(values)).collect();
            let named: Vec<(&str, &Sample)> = ["a", "b", "c"].into_iter().zip(&samples).collect();
            assert_eq!(Verdict::falling(&named).words(), expected, "{figures:?}");
        };
        check(&[&[9.0, 9.1], &[5.0, 5.1], &[1.0, 1.1]], "order holds");
        check(
            &[&[9.0, 5.0], &[5.0, 6.0], &[1.0, 1.1]],
            "order holds, not distinguishable: a / b",
        );
        check(&[&[1.0, 1.1], &[5.0, 5.1]], "**does not reproduce**");
        check(&[&[1.0, 1.0], &[1.0, 1.0]], "**does not reproduce**");
        check(&[&[], &[1.0]], "**does not reproduce**");
    }
}
