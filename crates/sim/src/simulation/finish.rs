//! The end: everything comes to rest, is checked, and becomes the outcome.

use super::Simulation;
use crate::checkers::{check_nodes, leftovers};
use crate::config::{SimError, SimOutcome};
use homing_report::RunRecord;

impl Simulation<'_> {
    pub(super) fn finish(mut self) -> Result<SimOutcome, SimError> {
        self.heal();
        self.converge()?;
        self.rest()?;
        check_nodes(&self.nodes);
        self.check_rest();
        self.checkers.result()?;
        for node in &mut self.nodes {
            node.close_life();
        }
        self.check_tokens();
        self.checkers.result()?;
        self.records.sort_by_key(|record| record.request);
        Ok(SimOutcome {
            left_out: self.left_out(),
            errands: self.router.view_errands(),
            run: RunRecord {
                seed: self.config.seed,
                requests: self.records,
                workers: self.nodes.iter().map(|node| node.record()).collect(),
            },
            logs: self.logs,
            recording: self.recorder.map(|mut recorder| {
                recorder.finish();
                recorder.take_bytes()
            }),
        })
    }

    /// Nothing is under way anywhere.
    fn check_rest(&mut self) {
        let now = self.now;
        for node in &self.nodes {
            if let Some(found) = leftovers(node) {
                self.checkers.note("that every engine is idle at the end", now, found);
            }
        }
        self.router.check_invariants();
        if !self.router.idle() {
            let found = format!("{:?}", self.router.view_workers());
            self.checkers
                .note("that nothing is booked in the router at the end", now, found);
        }
        if !self.legs.is_empty() || !self.pulls.is_empty() || !self.clients.is_empty() || !self.errands.is_empty() {
            let found = format!("{:?} {:?} {:?}", self.legs, self.pulls, self.clients.keys());
            self.checkers.note("that nothing is under way at the end", now, found);
        }
        if self.checkers.ended != self.replay.turn_count() {
            let found = format!("`{}` of `{}`", self.checkers.ended, self.replay.turn_count());
            self.checkers.note("that every turn ends once", now, found);
        }
    }

    /// Every token that an engine sampled was received by a client or was a prefill leg's, and every record has what its client received.
    fn check_tokens(&mut self) {
        let sampled: u64 = self.nodes.iter().map(|node| node.counts.sampled_tokens).sum();
        let recorded: u64 = self.records.iter().map(|record| u64::from(record.output_tokens)).sum();
        let received = self.checkers.received_tokens;
        let prefilled = self.checkers.prefill_tokens;
        let (lost, strangers) = (self.checkers.lost_tokens, self.checkers.stranger_tokens);
        if sampled != received + prefilled + lost + strangers || received != recorded {
            let found = format!(
                "`{sampled}` sampled, `{prefilled}` by prefill legs, `{strangers}` for strangers, `{lost}` lost, \
                 `{received}` received, `{recorded}` on record"
            );
            self.checkers.note("that tokens are conserved", self.now, found);
        }
    }
}
