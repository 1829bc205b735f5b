//! Whom a session shares its decode worker with: what the other sessions there hold decides whether it starves.

use super::mean;
use crate::observe::Observed;
use crate::rerun::{LUCKY_FROM, STARVED_BELOW};
use std::collections::BTreeMap;

/// Prompt tokens of the other sessions' turns on a session's decode worker, on average: of sessions that starve, and of
/// those that do well. `None` where a run has none of a kind.
pub(super) fn of_starved_and_lucky(run: &Observed) -> (Option<f64>, Option<f64>) {
    let mut served: BTreeMap<&str, (&str, f64)> = BTreeMap::new();
    let mut workers: BTreeMap<&str, f64> = BTreeMap::new();
    for request in &run.record.requests {
        let Some(worker) = request.worker.as_deref() else {
            continue;
        };
        let tokens = f64::from(request.prompt_tokens);
        let session = served.entry(&request.session_name).or_insert((worker, 0.0));
        session.1 += tokens;
        *workers.entry(worker).or_default() += tokens;
    }
    let of = |fate: fn(f64) -> bool| {
        let rates = run.run.sessions.append_rates.iter();
        let company = rates.filter(|session| fate(session.append_rate)).filter_map(|session| {
            let (worker, own) = served.get(session.session.as_str())?;
            Some(workers[worker] - own)
        });
        mean(&company.collect::<Vec<f64>>())
    };
    (of(|rate| rate < STARVED_BELOW), of(|rate| rate >= LUCKY_FROM))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::tests::four_kinds;

    #[test]
    fn company_is_what_the_others_on_the_same_worker_send() {
        let mut run = four_kinds();
        let requests = &mut run.record.requests;
        for (request, tokens) in requests.iter_mut().zip([10, 200, 30, 400, 50]) {
            request.worker = Some("d0".to_owned());
            request.prompt_tokens = tokens;
        }
        // Session 1 starves beside the 90 tokens of session 0, which had one append of two and is of neither kind.
        assert_eq!(of_starved_and_lucky(&run), (Some(90.0), None));
        run.run.sessions.append_rates[0].append_rate = 1.0;
        assert_eq!(of_starved_and_lucky(&run), (Some(90.0), Some(600.0)));
    }
}
