//! KVC v5 over ten seeds beside the papers' three runs, and beside the baseline that beats it.

use super::{Experiment, Get, dp, sample, sample_of_threes, spared, stack};
use crate::observe::{Observed, is_fallback};
use crate::paper::Paper;
use crate::results::Results;
use crate::sample::Sample;
use crate::section::{Row, Section, Shared, Table, each, estimate, list, number};
use crate::setup::Setup;
use crate::verdict::{Expect, Verdict};

pub(super) const EXPERIMENT: Experiment = Experiment {
    name: "kvc",
    setups,
    section,
};

const INTRO: &str = "\
Two prefill and six decode H100, `kv-aware` and the papers' stack: session slots, the handshake of SGLang in which the decode worker makes
room before the prompt is prefilled, a timeout of 32 s, lists of dead peers that last for ever. Gaps divided by 10, 32 live sessions. Where the
papers are silent, readings were tried before this one was kept, so the errors are no prediction: a slot is opened when a request arrives or
not at all; an idle slot is trimmed when a seed does not fit; the timeout holds for the handshake and again for the transfer; pools have
136,000 tokens, a memory fraction of 0.90, at which the baseline's mean time to first token fits (its own rows are at 92,000). What the other readings do is in the next section. Admission is
answered from a snapshot. Each of the ten seeds has other sessions. The papers ran the same ones three times; \"reruns\" are such runs,
nine of them, three for each figure. The baseline here has the same pool and the same sessions.";

fn baseline() -> Setup {
    dp::baseline(stack::POOL)
}

fn setups() -> Vec<Setup> {
    vec![stack::v5(), stack::reruns(), baseline()]
}

const FIGURES: [(&str, &str, Get); 5] = [
    ("kvc.latency.mean", "latency, mean", |run| run.run.latency_s.mean),
    ("kvc.latency.p50", "latency, p50", |run| run.run.latency_s.p50),
    ("kvc.latency.p90", "latency, p90", |run| run.run.latency_s.p90),
    ("kvc.ttft.mean", "TTFT, mean", |run| run.run.ttft_s.mean),
    ("kvc.ttft.p50", "TTFT, p50", |run| run.run.ttft_s.p50),
];

fn section(paper: &Paper, results: &Results) -> Section {
    let mut section = Section::new("KVC v5", INTRO, setups());
    errors(paper, results, &mut section);
    let mut why = why_faster(paper, results);
    for (key, what, get) in FIGURES {
        let ours = sample(results, &stack::v5(), get);
        let faster = ours.mean() < Some(paper.figure(key).mean());
        let row = Row::figure(paper, key, what, Expect::Factor(2.0), &ours);
        section.row(why.explain(faster, row));
    }
    variance(paper, results, &mut section);
    against_baseline(paper, results, &mut why, &mut section);
    section.tables.push(runs(results));
    section
}

fn errors(paper: &Paper, results: &Results, section: &mut Section) {
    let errors = sample(results, &stack::v5(), |run| Some(run.errors()));
    let hundreds = errors.mean().is_some_and(|mean| (100.0..1000.0).contains(&mean));
    let row = Row::claim(
        paper,
        &["kvc.errors"],
        "errors, in the hundreds",
        format!("{}: {}", estimate(&errors, ""), each(&errors)),
        Verdict::shape(hundreds),
    );
    let mut why = why_more_errors(results, &stack::v5());
    let theirs = paper.figure("kvc.errors").mean();
    let more = errors.mean() > Some(theirs);
    section.row(why.explain(more, row));
    let [fewest, most] = errors.range().unwrap_or_default();
    let spread = if fewest > 0.0 {
        number(most / fewest)
    } else {
        format!("without bound: {} to {}", number(fewest), number(most))
    };
    section.row(Row::claim(
        paper,
        &["kvc.spread.errors"],
        "errors, most by fewest of ten seeds, at least 1.5",
        spread,
        Verdict::shape(most >= 1.5 * fewest && most > 0.0),
    ));
    let share = sample(results, &stack::v5(), |run| {
        share(run.run.errors.total as usize, run.run.requests as f64)
    });
    let row = Row::figure(
        paper,
        "kvc.error_share",
        "requests that fail",
        Expect::Factor(2.0),
        &share,
    );
    let row = why.explain(more, row);
    let few = spared(results, &stack::v5()).filter(|_| !more);
    section.row(row.because(few.is_some(), few.unwrap_or_default()));
}

/// What makes more errors than theirs, as far as it shows.
pub(super) fn why_more_errors(results: &Results, setup: &Setup) -> Shared {
    let dead = sample(results, setup, |run| share(run.dead_transfers().count(), run.errors()));
    let most = dead.mean().is_some_and(|dead| dead > 50.0);
    Shared::new(Vec::from_iter(most.then(|| {
        format!(
            "{} of the errors are transfers over links on the lists of dead peers: once a link is on one, whatever is to go over it fails at once.",
            estimate(&dead, "%")
        )
    })))
}

/// In percent.
fn share(part: usize, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part as f64 / whole * 100.0)
}

/// What makes completed requests faster than theirs, as far as it shows.
fn why_faster(paper: &Paper, results: &Results) -> Shared {
    let at = |get: Get| sample(results, &stack::v5(), get);
    let mut reasons = Vec::new();
    let fell_back = at(|run| share(fallbacks(run), later_turns(run)));
    let theirs = not_direct(paper);
    if fell_back.mean().is_some_and(|ours| ours < theirs / 1.5) {
        reasons.push(format!(
            "Only {} of the later turns completed over the slow path, a prefill elsewhere; by the middles of their histogram's fifths some {} of \
             theirs were not direct.",
            estimate(&fell_back, "%"),
            number(theirs)
        ));
    }
    let (failed, completed) = (at(|run| mean_prompt(run, true)), at(|run| mean_prompt(run, false)));
    if failed.differs_from(&completed) && failed.mean() > completed.mean() {
        reasons.push(format!(
            "What failed is in no latency, and it was the longer part: prompts of {} against {} of those that completed.",
            estimate(&failed, "tokens"),
            estimate(&completed, "tokens")
        ));
    }
    Shared::new(reasons)
}

fn later_turns(run: &Observed) -> f64 {
    run.record
        .requests
        .iter()
        .filter(|request| !request.first_of_agent)
        .count() as f64
}

fn fallbacks(run: &Observed) -> usize {
    run.record
        .requests
        .iter()
        .filter(|request| is_fallback(request))
        .count()
}

fn mean_prompt(run: &Observed, failed: bool) -> Option<f64> {
    let requests = run.record.requests.iter();
    let prompts: Vec<f64> = requests
        .filter(|request| request.error.is_some() == failed)
        .map(|request| f64::from(request.prompt_tokens))
        .collect();
    super::mean(&prompts)
}

/// The share of their later turns that did not go direct, in percent, by the middles of their histogram's fifths.
fn not_direct(paper: &Paper) -> f64 {
    const MIDDLES: [f64; 5] = [0.1, 0.3, 0.5, 0.7, 0.9];
    let (mut direct, mut sessions) = (0.0, 0.0);
    for run in ["run1", "run2", "run3"] {
        let histogram = &paper.figure(&format!("pin.histogram.{run}")).values;
        sessions += histogram.iter().sum::<f64>();
        direct += histogram
            .iter()
            .zip(MIDDLES)
            .map(|(count, middle)| count * middle)
            .sum::<f64>();
    }
    (1.0 - direct / sessions) * 100.0
}

/// How much three runs of the same sessions differ.
fn variance(paper: &Paper, results: &Results, section: &mut Section) {
    let of_threes = |get: Get| {
        sample_of_threes(results, &stack::reruns(), |runs| {
            Sample::of(runs.iter().map(get)).spread()
        })
    };
    let errors = of_threes(|run| Some(run.errors()));
    let row = Row::figure(
        paper,
        "kvc.spread.errors",
        "errors of three reruns, most by fewest",
        Expect::Factor(2.0),
        &errors,
    );
    let few = spared(results, &stack::reruns());
    section.row(row.because(few.is_some(), few.unwrap_or_default()));
    let drift = Sample::of(
        of_threes(|run| run.run.latency_s.p50)
            .values
            .iter()
            .map(|ratio| Some((ratio - 1.0) * 100.0)),
    );
    let row = Row::figure(
        paper,
        "kvc.spread.p50",
        "latency p50 of three reruns, most above fewest",
        Expect::Factor(2.0),
        &drift,
    );
    let direct = sample(results, &stack::reruns(), |run| {
        share(run.run.paths.append as usize, run.run.requests as f64)
    });
    section.row(row.because(
        direct.range().is_some_and(|[fewest, _]| fewest > 50.0),
        format!(
            "In every rerun over half of the requests were direct ({} to {} %), so the median is that of direct appends, which errors do not touch.",
            number(direct.range().map_or(0.0, |range| range[0])),
            number(direct.range().map_or(0.0, |range| range[1]))
        ),
    ));
}

/// A figure in which KVC loses to the baseline.
struct Loss {
    key: &'static str,
    figure: &'static str,
    get: Get,
    /// Whether the paper says by how many percent it is above the baseline's, and not how many times it is that.
    percent_above: bool,
}

const LOSSES: [Loss; 3] = [
    Loss {
        key: "kvc.worse.latency_mean",
        figure: "latency mean",
        get: |run| run.run.latency_s.mean,
        percent_above: true,
    },
    Loss {
        key: "kvc.worse.latency_p50",
        figure: "latency p50",
        get: |run| run.run.latency_s.p50,
        percent_above: true,
    },
    Loss {
        key: "kvc.worse.ttft_mean",
        figure: "TTFT mean",
        get: |run| run.run.ttft_s.mean,
        percent_above: false,
    },
];

impl Loss {
    fn what(&self) -> String {
        let how = if self.percent_above { "above" } else { "by" };
        format!("{}, {how} the baseline's", self.figure)
    }

    /// KVC against the baseline, seed by seed.
    fn of(&self, results: &Results) -> Sample {
        let (kvc, dp) = (results.of(&stack::v5()), results.of(&baseline()));
        let ratios = kvc
            .iter()
            .zip(dp)
            .map(|(kvc, dp)| Some((self.get)(kvc)? / (self.get)(dp)?));
        Sample::of(ratios.map(|ratio| {
            ratio.map(|ratio| {
                if self.percent_above {
                    (ratio - 1.0) * 100.0
                } else {
                    ratio
                }
            })
        }))
    }
}

/// Whether KVC loses, and by how much.
fn against_baseline(paper: &Paper, results: &Results, why: &mut Shared, section: &mut Section) {
    let (mut worse, mut shown) = (true, Vec::new());
    for loss in &LOSSES {
        let (kvc, dp) = (
            sample(results, &stack::v5(), loss.get),
            sample(results, &baseline(), loss.get),
        );
        worse &= kvc.mean() > dp.mean() && kvc.differs_from(&dp);
        shown.push(format!(
            "{} {} against {}",
            loss.figure,
            estimate(&kvc, "s"),
            estimate(&dp, "s")
        ));
    }
    let row = Row::claim(
        paper,
        &LOSSES.map(|loss| loss.key),
        "KVC loses to the baseline in all three",
        shown.join(", "),
        Verdict::shape(worse),
    );
    section.row(why.explain(true, row));
    for loss in &LOSSES {
        let ours = loss.of(results);
        let smaller = ours.mean() < Some(paper.figure(loss.key).mean());
        let row = Row::figure(paper, loss.key, &loss.what(), Expect::Factor(2.0), &ours);
        let row = why.explain(smaller, row);
        section.row(row.because(!smaller, slower_fallbacks(paper, results)));
    }
}

/// Why KVC loses by more than theirs.
fn slower_fallbacks(paper: &Paper, results: &Results) -> String {
    let latency = sample(results, &stack::v5(), |run| {
        let slow = run.record.requests.iter().filter(|request| is_fallback(request));
        super::mean(&slow.map(|request| request.latency().as_secs_f64()).collect::<Vec<_>>())
    });
    format!(
        "A fallback takes {} against their {} s, and the baseline is somewhat faster than theirs.",
        estimate(&latency, "s"),
        number(paper.figure("fallback.latency").mean())
    )
}

/// The reruns one by one, in threes.
fn runs(results: &Results) -> Table {
    let mut table = Table::new(
        "The same sessions again and again: each run of three reruns",
        &[
            "runs",
            "errors",
            "latency mean in s",
            "latency p50 in s",
            "latency p90 in s",
            "TTFT mean in s",
        ],
    );
    for (index, runs) in results.of(&stack::reruns()).chunks_exact(3).enumerate() {
        let all = |get: Get| list(&runs.iter().filter_map(get).collect::<Vec<_>>());
        table.row(vec![
            format!("{} to {}", index * 3 + 1, index * 3 + 3),
            all(|run| Some(run.errors())),
            all(|run| run.run.latency_s.mean),
            all(|run| run.run.latency_s.p50),
            all(|run| run.run.latency_s.p90),
            all(|run| run.run.ttft_s.mean),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn their_histogram_says_how_many_turns_were_not_direct() {
        // By hand: 1.5 + 2.1 + 5.5 + 3.5 + 12.6, 1.8 + 1.8 + 3.5 + 4.2 + 13.5, 1.6 + 2.1 + 4.5 + 2.8 + 14.4 of 3 * 52 sessions.
        let direct = (25.2 + 24.8 + 25.4) / 156.0;
        assert!((not_direct(&Paper::load()) - (1.0 - direct) * 100.0).abs() < 1e-9);
    }
}
