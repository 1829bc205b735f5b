//! What the planner expects of first tokens, on hardware that nobody told it, against what they take.

use homing_report::logs::{DecisionLine, LogKind};
use homing_sim::{Cluster, SimConfig, simulate};
use homing_workload::{Start, generate};
use std::collections::BTreeMap;

/// Requests after which a worker's speed must be known.
const KNOWN_AFTER: usize = 200;

/// The median error of a forecast, as a share of what the first token took, over the requests after the first 200.
fn median_error(profile: &str, workers: &str, generator: &str) -> f64 {
    let cluster = Cluster::from_toml(profile, &format!("step_model = \"{profile}\"\n{workers}")).expect("a cluster");
    let trace = generate(generator, 1).expect("a generator");
    let mut config = SimConfig::new(&trace, cluster, "homing".parse().expect("the planner"));
    config.replay.start = Start::Concurrency(8);
    config.logs = true;
    let outcome = simulate(&trace, &config).expect("a run");
    let lines = outcome.logs.text(LogKind::Decisions).lines();
    let decisions = lines.map(|line| serde_json::from_str::<DecisionLine>(line).expect("a decision"));
    let plans: BTreeMap<u64, DecisionLine> = decisions.map(|line| (line.request, line)).collect();
    let mut requests = outcome.run.requests;
    requests.sort_by_key(|request| request.arrival);
    let error = |request: &homing_report::RequestRecord| {
        let plan = plans.get(&request.request).filter(|plan| plan.attempt == 0)?;
        let took_s = request.first_token?.saturating_since(request.arrival).as_secs_f64() - plan.queued_s;
        Some((plan.expected_ttft_s? / took_s - 1.0).abs())
    };
    let mut errors: Vec<f64> = requests.iter().skip(KNOWN_AFTER).filter_map(error).collect();
    assert!(errors.len() > 200, "{profile}: only {} forecasts", errors.len());
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

/// Short tails on a dense model are what the built-in form fits worst: they wake no experts, and the fit took that for tokens that cost
/// forty times as much.
#[test]
fn first_tokens_are_foreseen_on_hardware_that_nobody_named() {
    const DP: &str = "[[workers]]\nrole = \"both\"\ncount = 3\n";
    const PD: &str = "[[workers]]\nrole = \"prefill\"\ncount = 1\n[[workers]]\nrole = \"decode\"\ncount = 2\n";
    for profile in ["h20-qwen3-30b", "h100-llama3-8b", "h100-qwen3-32b-tp2"] {
        for (shape, workers) in [("data-parallel", DP), ("prefill/decode", PD)] {
            for generator in ["gen:swe52:sessions=12", "gen:agent:sessions=12"] {
                let error = median_error(profile, workers, generator);
                assert!(
                    error <= 0.10,
                    "{generator} on {profile}, {shape}: a median error of {error:.3}"
                );
            }
        }
    }
}
