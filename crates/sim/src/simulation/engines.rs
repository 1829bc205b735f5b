//! The engines: legs arrive, steps begin and end, and what engines say is passed on.

use super::evictions::Announced;
use super::{Simulation, Wake, earlier, rings};
use crate::heap::Rank;
use crate::legs::Piece;
use homing_engine::api::{
    Export, ExportEnd, FinishReason, Finished, Input, KvChange, Output, Reject, Sampled, StepItem, Submit, Transfer,
};
use homing_report::logs::{Admission, EvictionCause};
use homing_router::action::{Dispatch, KvUse};
use homing_router::event::{FailureCause, Leg, LegUsage};
use homing_units::{BootEpoch, RequestId};

impl Simulation<'_> {
    /// A leg has passed its worker's front end.
    pub(super) fn arrive(&mut self, engine_id: RequestId) {
        let Some(leg) = self.legs.get_mut(engine_id) else {
            return;
        };
        if self.nodes[leg.node].engine.is_none() {
            let (node, leg) = (leg.node, leg.id);
            // The router doubts the worker: the next probe is news, whatever the last one said.
            self.nodes[node].probed = None;
            self.forget_leg(engine_id);
            self.fail_leg(leg, FailureCause::Unreachable);
            return;
        }
        if !self.shakes_hands(engine_id) && self.dropped_for_dead(engine_id) {
            return;
        }
        let Some(leg) = self.legs.get_mut(engine_id) else {
            return;
        };
        let (index, epoch) = (leg.node, self.nodes[leg.node].epoch);
        leg.arrived = true;
        leg.epoch = epoch;
        let transfer = match leg.kv {
            KvUse::Local => Transfer::None,
            KvUse::Export => Transfer::Export,
            KvUse::Import { .. } => Transfer::Import {
                tokens: leg.prompt.tokens,
            },
        };
        let submit = Submit {
            id: engine_id,
            prompt: leg.prompt.clone(),
            max_output_tokens: leg.max_output_tokens,
            transfer,
            session: leg.session,
            owner: leg.owner,
        };
        self.remember_request(engine_id);
        self.tell_engine(index, epoch, Input::Submit(submit));
    }

    pub(super) fn end_step(&mut self, index: usize, epoch: BootEpoch) {
        if self.nodes[index].epoch != epoch {
            return;
        }
        let Some(step) = self.nodes[index].step.take() else {
            return;
        };
        self.remember_step(index, &step.items);
        let sampled: Vec<Sampled> = step
            .items
            .iter()
            .filter(|item| item.sample)
            .filter_map(|item| self.sample(item))
            .collect();
        self.tell_engine(index, epoch, Input::StepDone(sampled));
    }

    /// A token of a leg, unless it was given up meanwhile.
    fn sample(&mut self, item: &StepItem) -> Option<Sampled> {
        let Some(leg) = self.legs.get_mut(item.id) else {
            return self.sample_for_stranger(item);
        };
        let (clients, errands) = (&self.clients, &self.errands);
        let request = leg.id.request;
        let client = clients.get(&request).or_else(|| errands.asker(request))?;
        leg.sampled += 1;
        let tokens = leg.prompt.tokens + leg.sampled;
        let block_size = self.trace.block_size;
        let filled = tokens
            .is_multiple_of(block_size)
            .then(|| client.answer_hash(leg.tip, tokens / block_size - 1));
        leg.tip = filled.or(leg.tip);
        match leg.id.leg {
            Leg::Lend | Leg::Fetch | Leg::Prefill => self.checkers.prefill_tokens += 1,
            Leg::Decode => self.pass_on(item.id, Piece::Token),
        }
        Some(Sampled {
            id: item.id,
            stop: false,
            filled,
        })
    }

    pub(super) fn engine_timer(&mut self, index: usize, epoch: BootEpoch) {
        let node = &mut self.nodes[index];
        if node.epoch != epoch || !rings(&mut node.armed, self.now) {
            return;
        }
        self.tell_engine(index, epoch, Input::Timeout);
    }

    /// Takes everything that an engine has to say.
    pub(super) fn drain_engine(&mut self, index: usize) {
        let (mut changes, mut evicted) = (Vec::new(), Announced::default());
        while let Some(output) = self.nodes[index]
            .engine
            .as_mut()
            .and_then(|engine| engine.poll_output())
        {
            match output {
                Output::Step(step) => {
                    self.log_evictions(index, &mut evicted, EvictionCause::Step, None);
                    let node = &mut self.nodes[index];
                    let ends = node.begin(self.now, step);
                    self.heap.plan(
                        ends,
                        Rank::Step,
                        Wake::StepEnds {
                            node: index,
                            epoch: node.epoch,
                        },
                    );
                }
                Output::Import(import) => {
                    self.log_evictions(index, &mut evicted, EvictionCause::Import, Some(import.id));
                    if !self.room_was_made(&import) {
                        self.begin_pull(index, &import);
                    }
                }
                Output::Exported(export) => self.exported(index, &export),
                Output::ExportEnded { id, reason } => self.export_ended(index, id, reason),
                Output::Rejected { id, reason } => self.rejected(id, reason),
                // It goes on by itself; the engine counts it.
                Output::Preempted { .. } => {}
                Output::Finished(finished) => self.leg_finished(&finished),
                Output::Trimmed(trimmed) => self.log_trim(index, trimmed),
                Output::Crashed { reason, .. } => return self.die(index, reason),
                Output::Reload(reload) => {
                    self.log_evictions(index, &mut evicted, EvictionCause::Reload, Some(reload.id));
                    self.begin_reload(index, &reload);
                }
                Output::Kv(event) => {
                    self.remember_change(index, &event.change);
                    self.announce_eviction(index, &event.change, &mut evicted);
                    self.spill(index, &event.change);
                    changes.push(event.change);
                }
            }
        }
        // A step that found no room after all.
        self.log_evictions(index, &mut evicted, EvictionCause::Step, None);
        self.after_drain(index, changes);
    }

    fn after_drain(&mut self, index: usize, mut changes: Vec<KvChange>) {
        if self.config.cluster.stack.defects.hides_removals {
            changes.retain(|change| !matches!(change, KvChange::Removed { .. }));
        }
        let node = &mut self.nodes[index];
        node.note_usage();
        if !changes.is_empty() && !self.config.cluster.stack.defects.hides_events {
            let batch = node.batch(changes);
            self.publish(index, batch);
        }
        let node = &mut self.nodes[index];
        let due = node.engine.as_ref().and_then(|engine| engine.poll_timeout());
        if let Some(due) = earlier(due, &mut node.armed, self.now) {
            let epoch = node.epoch;
            self.heap
                .plan(due, Rank::Timer, Wake::EngineTimer { node: index, epoch });
        }
    }

    fn exported(&mut self, index: usize, export: &Export) {
        self.nodes[index].exports.insert(export.id);
        if let Some(leg) = self.legs.get_mut(export.id) {
            leg.exported = true;
            self.start_transfer_clock(export.id);
            self.plan_renewal(index, export.id);
        }
    }

    fn export_ended(&mut self, index: usize, id: RequestId, reason: ExportEnd) {
        self.nodes[index].exports.remove(&id);
        let leg = self.forget_leg(id);
        if reason == ExportEnd::LeaseEnded {
            self.nodes[index].counts.transfer_errors += 1;
            if let Some(leg) = leg {
                self.lease_ended(index, leg.id);
            }
        }
    }

    fn rejected(&mut self, engine_id: RequestId, reason: Reject) {
        self.trouble.stranger_ended(engine_id);
        let Some(leg) = self.forget_leg(engine_id) else { return };
        let cause = match reason {
            Reject::QueueFull => FailureCause::Busy,
            Reject::ContextTooLong | Reject::PoolTooSmall | Reject::Invalid => FailureCause::Invalid,
        };
        let worker = self.nodes[leg.node].id;
        self.log_admission(leg.id.request, Some(worker), Admission::Denied, &format!("{reason:?}"));
        self.fail_leg(leg.id, cause);
    }

    fn leg_finished(&mut self, finished: &Finished) {
        let engine_id = finished.id;
        self.trouble.stranger_ended(engine_id);
        let Some(leg) = self.legs.get(engine_id) else { return };
        let leg_id = leg.id;
        match (finished.reason, leg_id.leg) {
            (FinishReason::Stop | FinishReason::Length, Leg::Lend | Leg::Fetch | Leg::Prefill) => {
                let cached_tokens = finished.usage.local_cached_tokens;
                self.count_computed(leg_id.request, finished);
                self.pass_on(engine_id, Piece::Prefilled { cached_tokens });
            }
            (FinishReason::Stop | FinishReason::Length, Leg::Decode) => {
                self.count_computed(leg_id.request, finished);
                let usage = LegUsage {
                    cached_tokens: Some(finished.usage.local_cached_tokens),
                    output_tokens: finished.usage.output_tokens,
                };
                self.pass_on(engine_id, Piece::Ended(usage));
            }
            (FinishReason::ImportFailed(_), Leg::Decode) if self.config.cluster.stack.defects.recomputes => {
                self.recompute(engine_id);
            }
            (FinishReason::ImportFailed(_), _) => {
                self.forget_leg(engine_id);
                self.fail_leg(leg_id, FailureCause::Transfer);
            }
            (FinishReason::Aborted, _) => {
                self.checkers
                    .note("that only given-up legs are aborted", self.now, format!("{leg_id:?}"));
            }
        }
    }

    /// A decode worker whose KV did not arrive computes the prompt itself, as a leg that nobody was told of.
    fn recompute(&mut self, failed: RequestId) {
        let Some(leg) = self.forget_leg(failed) else { return };
        let alone = Dispatch {
            leg: leg.id,
            worker: self.nodes[leg.node].id,
            kv: KvUse::Local,
            prefix_tokens: None,
        };
        if let Some(engine_id) = self.begin_leg(alone) {
            self.heap.plan(self.now, Rank::Arrival, Wake::Arrival(engine_id));
        }
    }

    /// Adds what a leg computed of the prompt.
    fn count_computed(&mut self, request: RequestId, finished: &Finished) {
        let usage = finished.usage;
        if let Some(client) = self.clients.get_mut(&request) {
            client.computed_tokens +=
                usage.prompt_tokens - usage.local_cached_tokens - usage.host_cached_tokens - usage.imported_tokens;
        }
    }
}
