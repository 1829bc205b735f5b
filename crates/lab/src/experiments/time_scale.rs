//! Time scale 1 against 10, which the validation report called its most important missing experiment.

use super::{Experiment, dp, sample, spared, stack};
use crate::observe::Observed;
use crate::paper::Paper;
use crate::results::Results;
use crate::sample::Sample;
use crate::section::{Row, Section, Table, estimate};
use crate::setup::Setup;
use crate::verdict::{Expect, Verdict};
use homing_report::stats::{quantile, sorted};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "time-scale",
    setups,
    section,
};

const INTRO: &str = "\
KVC v5 and the baseline at the same pool, once with gaps divided by 10 and once as they were. First sessions start within 10 s, divided \
by the time scale as recorded starts are: at scale 1 a decode worker can be warm with the boilerplate before the others are asked, and
`kv-aware` then herds; the share of the busiest one shows it.";

/// Whose runs, at time scale 10.
fn systems() -> [(&'static str, Setup); 2] {
    [
        ("KVC v5", stack::v5().seeds(3)),
        ("data-parallel", dp::baseline(stack::POOL).seeds(3)),
    ]
}

fn setups() -> Vec<Setup> {
    let both = |(_, setup): (&str, Setup)| [setup.clone(), setup.time_scale(1)];
    systems().into_iter().flat_map(both).collect()
}

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("Time scale 1 against 10", INTRO, setups());
    gaps(paper, results, &mut section);
    let [(_, kvc), (_, dp)] = systems();
    let latency = |setup: &Setup| sample(results, setup, |run| run.run.latency_s.mean);
    let real = [latency(&kvc.clone().time_scale(1)), latency(&dp.clone().time_scale(1))];
    let loses = real[0].mean() > real[1].mean() && real[0].differs_from(&real[1]);
    section.row(Row::open(
        "KVC loses to data-parallel routing at time scale 1 too, in latency mean",
        format!("{} against {}", estimate(&real[0], "s"), estimate(&real[1], "s")),
        Verdict::shape(loses),
    ));
    let errors = |setup: &Setup| sample(results, setup, |run| Some(run.errors()));
    let [fast, slow] = [errors(&kvc), errors(&kvc.clone().time_scale(1))];
    let row = Row::open(
        "KVC fails less at time scale 1 than at 10 (their guess: workers have time to drain)",
        format!("{} against {} errors", estimate(&slow, ""), estimate(&fast, "")),
        Verdict::shape(slow.mean() < fast.mean() && slow.differs_from(&fast)),
    );
    let few = spared(results, &kvc);
    section.row(row.because(few.is_some(), format!("At time scale 10: {}", few.unwrap_or_default())));
    let mut table = Table::new(
        "Both systems at both scales",
        &[
            "system",
            "time scale",
            "errors",
            "latency mean",
            "latency p90",
            "TTFT mean",
            "sessions starved",
            "share of the busiest D in %",
        ],
    );
    for (name, setup) in systems() {
        for scale in [10, 1] {
            let setup = setup.clone().time_scale(scale);
            let at = |get: fn(&Observed) -> Option<f64>, unit: &str| estimate(&sample(results, &setup, get), unit);
            table.row(vec![
                name.to_owned(),
                scale.to_string(),
                at(|run| Some(run.errors()), ""),
                at(|run| run.run.latency_s.mean, "s"),
                at(|run| run.run.latency_s.p90, "s"),
                at(|run| run.run.ttft_s.mean, "s"),
                at(|run| Some(run.run.sessions.starved as f64), ""),
                at(busiest, ""),
            ]);
        }
    }
    section.tables.push(table);
    section
}

/// Tenths, median, 90th and 99th hundredth, and the largest, as in the paper; thousandths.
const QUANTILES: [usize; 5] = [100, 500, 900, 990, 1000];

/// The gaps between a turn's end and the next turn of its agent, at both scales.
fn gaps(paper: &Paper, results: &Results, section: &mut Section) {
    let [(_, kvc), _] = systems();
    for (key, scale) in [("gaps.scale1", 1), ("gaps.scale10", 10)] {
        let setup = kvc.clone().time_scale(scale);
        let ours = QUANTILES.map(|per_mille| sample(results, &setup, |run| quantile(&sorted(run.gaps()), per_mille)));
        let close = |(ours, theirs): (&Sample, &f64)| Verdict::of(Expect::Factor(1.5), Some(*theirs), ours).holds();
        let all = ours.iter().zip(&paper.figure(key).values).all(close);
        section.row(Row::claim(
            paper,
            &[key],
            &format!("gaps between turns at time scale {scale}: p10, p50, p90, p99 and the largest, each within a factor of 1.5"),
            ours.iter().map(|gap| estimate(gap, "s")).collect::<Vec<_>>().join(" / "),
            Verdict::shape(all),
        ));
    }
}

/// Requests of the decode worker that had the most, as a share of all in percent.
fn busiest(run: &Observed) -> Option<f64> {
    let requests = run.decode_requests();
    let all: f64 = requests.iter().sum();
    Some(requests.into_iter().fold(0.0, f64::max) / all * 100.0)
}
