//! The plot: TTFT p90 against TPOT p90, a panel for each cell at and beyond the knee, a mark for each policy.
//!
//! A document beside which it lies is generated, and so is this: an SVG of a few plain shapes with fixed decimals, the same bytes for
//! the same figures. Axes are logarithmic, because the worst policies are tens of times worse than the best.

use super::figures::{TPOT_P90, TTFT_P90, sample};
use super::{Cell, Comparison, Outcomes, others};
use std::fmt::Write as _;

const COLUMNS: usize = 3;
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 300.0;
/// The plot inside a panel: left, top, right, bottom.
const FRAME: [f64; 4] = [52.0, 46.0, 388.0, 262.0];

/// What lies outside of these multiples of the best is drawn at the edge.
const SPAN: f64 = 30.0;

/// A policy's place in a cell.
struct Point {
    policy: &'static str,
    ttft_s: f64,
    tpot_s: f64,
}

fn points(outcomes: &Outcomes, cell: &Cell) -> Vec<Point> {
    let point = |policy: &'static str| {
        let mean = |figure| sample(outcomes, cell, policy, figure).mean().filter(|mean| *mean > 0.0);
        Some(Point {
            policy,
            ttft_s: mean(TTFT_P90)?,
            tpot_s: mean(TPOT_P90)?,
        })
    };
    ["homing"].into_iter().chain(others()).filter_map(point).collect()
}

/// The policies of a cell that no other beats in both figures, the least TTFT first.
pub(super) fn front(outcomes: &Outcomes, cell: &Cell) -> Vec<&'static str> {
    let points = points(outcomes, cell);
    on_front(&points).into_iter().map(|point| point.policy).collect()
}

fn on_front(points: &[Point]) -> Vec<&Point> {
    let beats = |other: &Point, point: &Point| other.ttft_s < point.ttft_s && other.tpot_s < point.tpot_s;
    let mut front: Vec<&Point> = points
        .iter()
        .filter(|point| !points.iter().any(|other| beats(other, point)))
        .collect();
    front.sort_by(|left, right| {
        left.ttft_s
            .total_cmp(&right.ttft_s)
            .then(right.tpot_s.total_cmp(&left.tpot_s))
    });
    front
}

fn panels(comparison: &Comparison) -> impl Iterator<Item = &Cell> {
    comparison.cells.iter().filter(|cell| cell.is_heavy())
}

/// Whether there is anything to plot.
pub(super) fn has_panels(comparison: &Comparison) -> bool {
    panels(comparison).next().is_some()
}

/// The plot of all cells at and beyond the knee.
#[must_use]
pub fn plot(comparison: &Comparison) -> String {
    let cells: Vec<&Cell> = panels(comparison).collect();
    let rows = cells.len().div_ceil(COLUMNS);
    let (width, height) = (WIDTH * COLUMNS as f64, HEIGHT * rows as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"10\">\n\
         <title>TTFT p90 against TPOT p90, all policies</title>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, cell) in cells.into_iter().enumerate() {
        let (column, row) = (index % COLUMNS, index / COLUMNS);
        let (x, y) = (WIDTH * column as f64, HEIGHT * row as f64);
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
        panel(&mut svg, &comparison.outcomes, cell);
        svg.push_str("</g>\n");
    }
    svg.push_str("</svg>\n");
    svg
}

/// A logarithmic axis: values from the least to [`SPAN`] times it or the largest, whichever is less, onto places.
struct Axis {
    least: f64,
    most: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (least, most) = values.fold((f64::INFINITY, 0.0_f64), |(least, most), value| {
            (least.min(value), most.max(value))
        });
        let least = least / 1.15;
        Self {
            least,
            most: (most * 1.15).min(least * SPAN).max(least * 2.0),
            from,
            to,
        }
    }

    fn at(&self, value: f64) -> f64 {
        let share = libm::log(value / self.least) / libm::log(self.most / self.least);
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Round values within it: 1, 2 and 5 of each decade.
    fn ticks(&self) -> Vec<f64> {
        let decades = (-6..6).map(|exponent| libm::pow(10.0, f64::from(exponent)));
        decades
            .flat_map(|decade| [decade, 2.0 * decade, 5.0 * decade])
            .filter(|tick| (self.least..=self.most).contains(tick))
            .collect()
    }
}

fn panel(svg: &mut String, outcomes: &Outcomes, cell: &Cell) {
    let [left, top, right, bottom] = FRAME;
    let points = points(outcomes, cell);
    let across = Axis::new(points.iter().map(|point| point.ttft_s), left, right);
    let up = Axis::new(points.iter().map(|point| point.tpot_s * 1e3), bottom, top);
    let _ = writeln!(
        svg,
        "<text x=\"{left}\" y=\"16\" font-weight=\"bold\">{}</text>\n<text x=\"{left}\" y=\"30\">{}, {}</text>\n\
         <rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#999999\"/>",
        cell.family.name,
        cell.cluster,
        cell.place(),
        right - left,
        bottom - top
    );
    for tick in across.ticks() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">{tick}</text>",
            across.at(tick),
            bottom + 13.0
        );
    }
    for tick in up.ticks() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555555\">{tick}</text>",
            left - 4.0,
            up.at(tick) + 3.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">TTFT p90 in s</text>\n\
         <text transform=\"translate(12 {:.1}) rotate(-90)\" text-anchor=\"middle\" fill=\"#555555\">TPOT p90 in ms</text>",
        f64::midpoint(left, right),
        bottom + 27.0,
        f64::midpoint(top, bottom)
    );
    marks(svg, &points, &across, &up);
}

fn marks(svg: &mut String, points: &[Point], across: &Axis, up: &Axis) {
    let place = |point: &Point| (across.at(point.ttft_s), up.at(point.tpot_s * 1e3));
    let front = on_front(points);
    let line: Vec<String> = front
        .iter()
        .map(|point| {
            let (x, y) = place(point);
            format!("{x:.1},{y:.1}")
        })
        .collect();
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#bbbbbb\" stroke-dasharray=\"3 3\"/>",
        line.join(" ")
    );
    // The planner last, so that nobody lies over it.
    for point in points.iter().rev() {
        let (x, y) = place(point);
        let named = point.policy == "homing" || front.iter().any(|other| other.policy == point.policy);
        let (colour, radius) = match (point.policy == "homing", named) {
            (true, _) => ("#d6453d", 5),
            (false, true) => ("#2f6db5", 4),
            (false, false) => ("#8fa3b8", 3),
        };
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"><title>{}: {:.3} s, {:.1} ms</title></circle>",
            point.policy,
            point.ttft_s,
            point.tpot_s * 1e3
        );
        if named {
            let (anchor, beside) = if x > 300.0 { ("end", -7.0) } else { ("start", 7.0) };
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{}</text>",
                x + beside,
                y - 5.0,
                point.policy
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(policy: &'static str, ttft_s: f64, tpot_s: f64) -> Point {
        Point { policy, ttft_s, tpot_s }
    }

    #[test]
    fn whom_nobody_beats_in_both_is_on_the_front() {
        let check = |points: &[Point], expected: &[&str]| {
            let front: Vec<&str> = on_front(points).into_iter().map(|point| point.policy).collect();
            assert_eq!(front, expected);
        };
        check(&[], &[]);
        check(
            &[
                point("a", 3.0, 1.0),
                point("b", 1.0, 3.0),
                point("c", 3.5, 2.0),
                point("d", 2.0, 2.0),
            ],
            &["b", "d", "a"],
        );
        // Who is as good in one of them is not beaten.
        check(&[point("a", 1.0, 1.0), point("b", 1.0, 2.0)], &["b", "a"]);
    }

    #[test]
    fn an_axis_keeps_order_and_ends_at_its_span() {
        let axis = Axis::new([1.0, 10.0, 1e6].into_iter(), 0.0, 100.0);
        assert!(axis.at(1.0) > 0.0 && axis.at(10.0) > axis.at(1.0));
        assert_eq!((axis.at(1e6), axis.at(0.1)), (100.0, 0.0));
        assert_eq!(axis.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0]);
        // A single value has room on both sides.
        let alone = Axis::new([4.0].into_iter(), 0.0, 100.0);
        assert!((0.0..100.0).contains(&alone.at(4.0)));
    }
}
