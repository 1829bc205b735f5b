//! Scales, ticks and axes that the charts share.

use super::escape;
use crate::metric::figure;
use std::fmt::Write as _;

/// The width of a drawing over the whole page.
const WIDE: f64 = 1100.0;

/// The size of a chart that takes half of the page, in pixels.
pub(super) const WIDTH: f64 = 560.0;
pub(super) const HEIGHT: f64 = 330.0;
/// The plot inside it, in pixels from the chart's corner.
pub(super) const FRAME: Frame = Frame {
    left: 46.0,
    top: 30.0,
    right: 546.0,
    bottom: 284.0,
};

/// Room for a chart inside its drawing, in its own units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub left: f64,
    pub top: f64,
    pub right: f64,
    pub bottom: f64,
}

/// From values to places along an axis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    /// Values `low` to `high` at places `from` to `to`.
    pub(crate) fn linear(values: [f64; 2], places: [f64; 2]) -> Self {
        let high = if values[1] > values[0] {
            values[1]
        } else {
            values[0] + 1.0
        };
        Self {
            low: values[0],
            high,
            log: false,
            from: places[0],
            to: places[1],
        }
    }

    /// The same on a logarithmic axis of positive values.
    pub(crate) fn log(values: [f64; 2], places: [f64; 2]) -> Self {
        let low = libm::log10(values[0]);
        let high = libm::log10(values[1]);
        Self {
            low,
            high: if high > low { high } else { low + 1.0 },
            log: true,
            from: places[0],
            to: places[1],
        }
    }

    /// Where a value lies; one outside lies at the end.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let value = if self.log {
            libm::log10(value.max(f64::MIN_POSITIVE))
        } else {
            value
        };
        let share = ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        self.from + share * (self.to - self.from)
    }

    /// The ends in values, as decimal logarithms where the axis is logarithmic.
    pub(crate) fn ends(&self) -> [f64; 2] {
        [self.low, self.high]
    }

    /// Where ticks go: round values, ten at most.
    pub(crate) fn ticks(&self) -> Vec<f64> {
        if self.log {
            self.log_ticks()
        } else {
            linear_ticks(self.low, self.high)
        }
    }

    fn log_ticks(&self) -> Vec<f64> {
        const DECADES_WITH_STEPS: f64 = 3.5;
        let steps: &[f64] = if self.high - self.low <= DECADES_WITH_STEPS {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        let mut ticks = Vec::new();
        for decade in -9..=12_i32 {
            let base = libm::pow(10.0, f64::from(decade));
            let inside = |value: &f64| (self.low - 1e-9..=self.high + 1e-9).contains(&libm::log10(*value));
            ticks.extend(steps.iter().map(|step| step * base).filter(inside));
        }
        ticks
    }
}

/// Multiples of 1, 2 or 5 times a power of ten: seven at most.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    const WANTED: f64 = 6.0;
    let rough = (high - low) / WANTED;
    let base = libm::pow(10.0, libm::floor(libm::log10(rough)));
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|step| step * base)
        .find(|step| *step >= rough);
    let step = step.unwrap_or(base * 10.0);
    let (first, last) = (
        libm::ceil(low / step - 1e-9) as i64,
        libm::floor(high / step + 1e-9) as i64,
    );
    (first..=last).map(|index| index as f64 * step).collect()
}

/// A tick as text: `figure` without needless zeros.
pub(crate) fn tick(value: f64) -> String {
    if value.abs() >= 1e6 {
        return format!("{}M", trimmed(&figure(value / 1e6)));
    }
    if value.abs() >= 1e4 {
        return format!("{}k", trimmed(&figure(value / 1e3)));
    }
    trimmed(&figure(value)).to_owned()
}

fn trimmed(text: &str) -> &str {
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        text
    }
}

impl Frame {
    /// Begins a drawing of this size that says what it shows.
    pub(crate) fn begin(out: &mut String, width: f64, height: f64, says: &str) {
        let _ = write!(
            out,
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">",
            escape(says)
        );
    }

    /// Begins a drawing of rows, so high in all, below `top`, over the seconds of a run; gives the scale of these, too.
    pub(crate) fn begin_rows(out: &mut String, [top, height]: [f64; 2], end: f64, says: &str) -> (Self, Scale) {
        let frame = Self {
            left: 64.0,
            top,
            right: WIDE - 8.0,
            bottom: top + height,
        };
        Self::begin(out, WIDE, frame.bottom + 44.0, says);
        let x = Scale::linear([0.0, end], [frame.left, frame.right]);
        frame.x_axis(out, &x, "seconds from the run's start");
        (frame, x)
    }

    /// The x axis with grid lines, ticks and its name.
    pub(crate) fn x_axis(&self, out: &mut String, scale: &Scale, name: &str) {
        for value in scale.ticks() {
            let x = scale.at(value);
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{x:.1} {:.1}V{:.1}\"/><text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                self.top,
                self.bottom,
                self.bottom + 16.0,
                tick(value)
            );
        }
        let middle = f64::midpoint(self.left, self.right);
        let _ = write!(
            out,
            "<path class=\"axis\" d=\"M{:.1} {:.1}H{:.1}\"/><text class=\"name\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            self.left,
            self.bottom,
            self.right,
            self.bottom + 36.0,
            escape(name)
        );
    }

    /// The y axis with grid lines, ticks and its name, which lies above.
    pub(crate) fn y_axis(&self, out: &mut String, scale: &Scale, name: &str, text: impl Fn(f64) -> String) {
        for value in scale.ticks() {
            let y = scale.at(value);
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{:.1} {y:.1}H{:.1}\"/><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                self.left,
                self.right,
                self.left - 8.0,
                y + 4.0,
                text(value)
            );
        }
        let _ = write!(
            out,
            "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            2.0,
            self.top - 12.0,
            escape(name)
        );
    }
}

/// A bar with a title.
pub(crate) fn bar(out: &mut String, place: [f64; 4], colour: usize, title: &str) {
    let [x, y, width, height] = place;
    let _ = write!(
        out,
        "<rect class=\"f{colour}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"1.5\"><title>{}</title></rect>",
        escape(title)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        let check = |scale: Scale, expected: &[&str]| {
            let ticks: Vec<String> = scale.ticks().into_iter().map(tick).collect();
            assert_eq!(ticks, expected);
        };
        check(
            Scale::linear([0.0, 1.0], [0.0, 9.0]),
            &["0", "0.2", "0.4", "0.6", "0.8", "1"],
        );
        check(Scale::linear([0.0, 696.0], [0.0, 9.0]), &["0", "200", "400", "600"]);
        check(
            Scale::log([0.1, 10.0], [0.0, 9.0]),
            &["0.1", "0.2", "0.5", "1", "2", "5", "10"],
        );
        check(
            Scale::log([0.001, 100.0], [0.0, 9.0]),
            &["0.001", "0.01", "0.1", "1", "10", "100"],
        );
        check(Scale::log([24.0, 90_000.0], [0.0, 9.0]), &["100", "1000", "10k"]);
    }

    #[test]
    fn values_lie_where_the_scale_says() {
        let scale = Scale::log([0.1, 10.0], [0.0, 200.0]);
        assert!((scale.at(1.0) - 100.0).abs() < 1e-9);
        assert_eq!((scale.at(0.0), scale.at(1e9)), (0.0, 200.0));
        let point = Scale::linear([5.0, 5.0], [0.0, 10.0]);
        assert_eq!(point.at(5.0), 0.0);
    }
}
