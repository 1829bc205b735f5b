//! The page: complete, escaped, bounded, without a network, and the same bytes for the same input.

use super::*;
use crate::record::{LeftOut, Path, RequestRecord, WorkerRecord};
use crate::run::{ClassBounds, Experiment, Report, RunRecord};
use homing_units::Instant;

const HOSTILE: &str = "<script>alert('1')</script>\"&";

fn request(session: u32, turn: u32, worker: &str) -> RequestRecord {
    let at = |millis: u64| Instant::from_nanos(millis * 1_000_000);
    let begin = u64::from(session) * 50 + u64::from(turn) * 700;
    RequestRecord {
        request: u64::from(session) * 100 + u64::from(turn),
        session,
        session_name: format!("s{session}{HOSTILE}"),
        agent: 0,
        turn,
        first_of_agent: turn == 0,
        arrival: at(begin),
        first_token: Some(at(begin + 20 + u64::from(turn))),
        end: at(begin + 300 + u64::from(session % 7) * 10),
        itl_max: None,
        prompt_tokens: 1000,
        cached_tokens: 500,
        output_tokens: 20,
        path: Some(Path::Append),
        worker: Some(worker.to_owned()),
        prefill_worker: None,
        error: (session == 1 && turn == 2).then(|| "transfer_failed".to_owned()),
    }
}

fn logs(run: &RunRecord, workers: u32, samples: u32) -> RunLogs {
    let sample = |step: u32, worker: u32| WorkerSampleLine {
        t: f64::from(step),
        worker: format!("w{worker}{HOSTILE}"),
        running: step % 5,
        waiting: step % 3,
        importing: 0,
        exporting: 0,
        kv_tokens: 1000,
        kv_tokens_used: u64::from(step) % 1000,
        kv_tokens_cached: 100,
        prefill_tokens_pending: 0,
    };
    let eviction = |tokens: u64| EvictionLine {
        t: 1.0,
        worker: "w0".to_owned(),
        request: None,
        blocks: 1,
        tokens,
        cause: None,
        decisions: 1,
        session: None,
    };
    RunLogs {
        seed: Some(run.seed),
        requests: run.requests.iter().map(RequestLine::from).collect(),
        samples: (0..samples)
            .flat_map(|step| (0..workers).map(move |worker| sample(step, worker)))
            .collect(),
        evictions: [0, 24, 48, 70_000, u64::MAX / 2].map(eviction).to_vec(),
    }
}

/// A report of three runs, and its logs.
fn report(policy: &str, sessions: u32, workers: u32) -> (Source, Vec<RunLogs>) {
    let runs: Vec<RunRecord> = (1..=3)
        .map(|seed| RunRecord {
            seed,
            requests: (0..sessions)
                .flat_map(|session| {
                    (0..4).map(move |turn| request(session, turn, &format!("w{}{HOSTILE}", session % workers)))
                })
                .collect(),
            workers: vec![WorkerRecord {
                name: HOSTILE.to_owned(),
                role: HOSTILE.to_owned(),
                ..WorkerRecord::default()
            }],
        })
        .collect();
    let experiment = Experiment {
        trace: HOSTILE.to_owned(),
        cluster: HOSTILE.to_owned(),
        policy: policy.to_owned(),
        time_scale: 10.0,
        block_size: Some(24),
        classes: ClassBounds::default(),
        left_out: LeftOut::default(),
    };
    let logs = runs.iter().map(|run| logs(run, workers, 30)).collect();
    let source = Source {
        name: format!("runs/{HOSTILE}"),
        report: Report::new(&experiment, &runs),
    };
    (source, logs)
}

fn page_of(reports: Vec<(Source, Vec<RunLogs>)>) -> String {
    let (sources, logs): (Vec<Source>, Vec<Vec<RunLogs>>) = reports.into_iter().unzip();
    page(&Comparison::of(&sources), &sources, &logs)
}

fn two() -> String {
    page_of(vec![report(HOSTILE, 5, 3), report("homing", 5, 3)])
}

#[test]
fn what_comes_from_data_is_escaped_everywhere() {
    let page = two();
    assert!(page.contains("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;"));
    assert_eq!(page.matches("<script>").count(), 1, "its own script alone");
    assert!(!page.contains("alert('1')"));
}

#[test]
fn tags_are_balanced() {
    const VOID: [&str; 3] = ["meta", "input", "!DOCTYPE"];
    let page = two();
    // Neither the style nor the script has tags in it.
    let (mut open, mut rest) = (Vec::new(), page.split("<script>").next().expect("a page"));
    while let Some(start) = rest.find('<') {
        let end = rest[start..].find('>').map(|end| start + end).expect("a tag ends");
        let tag = &rest[start + 1..end];
        let name = tag
            .trim_start_matches('/')
            .split(|letter: char| letter.is_whitespace() || letter == '/')
            .next()
            .expect("a name");
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "near `{}`", &rest[..end.min(200)]);
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
        rest = &rest[end + 1..];
    }
    assert_eq!(open, ["html", "body"], "all but what the script stands in is closed");
}

#[test]
fn it_needs_nothing_from_outside() {
    let page = two();
    for outside in ["http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn equal_input_is_equal_bytes() {
    assert_eq!(two(), two());
}

#[test]
fn every_chart_is_there_and_names_its_axes() {
    let page = two();
    for expected in [
        "seconds (logarithmic)",
        "share of requests",
        "seconds from the run&#39;s start",
        "sessions, by arrival",
        "share of later turns that took append",
        "tokens in one eviction",
        "What can be said",
        "prefers-color-scheme:dark",
        "1 failed",
    ] {
        assert!(page.contains(expected), "{expected}");
    }
    assert_eq!(page.matches("<polyline").count(), 4);
}

#[test]
fn without_logs_it_says_so_and_a_single_report_has_no_verdict() {
    let (source, _) = report("homing", 3, 2);
    let page = page_of(vec![(source, Vec::new())]);
    assert_eq!(page.matches("class=\"empty\"").count(), 5);
    assert!(!page.contains("<th scope=\"col\">verdict</th>"));
}

#[test]
fn sizes_are_bounded_and_what_is_left_out_is_said() {
    let page = page_of(vec![report("homing", 900, 40)]);
    assert!(page.contains("The first 200 of 900 sessions are drawn."));
    assert!(page.contains("16 of 40 workers are drawn."));
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    for line in page.split("points=\"").skip(1) {
        let points = line.split('"').next().expect("a list");
        assert!(points.split_whitespace().count() <= 500);
        assert!(points.trim_end().ends_with(",30.0"), "the last point is all requests");
    }
}
