//! What happens to workers, and what follows for the requests on them.

use super::{Router, Timer};
use crate::action::Action;
use crate::event::{HealthReport, KvBatch, Leg, LoadReport, RoomReport, SketchReport, WorkerInfo};
use crate::feed::FeedStep;
use crate::fleet::{Life, Probe, Worker};
use crate::handoff::Signal;
use crate::room::Room;
use homing_units::{BootEpoch, WorkerId};

impl Router {
    pub(super) fn on_joined(&mut self, info: WorkerInfo) {
        let id = info.id;
        if let Some(known) = self.fleet.get_mut(id) {
            // The legs of the same life run on; those of another are lost.
            let life = known.meet(info.epoch);
            self.clear_feed_timers(id);
            if life == Life::New {
                self.lose(id);
            }
            self.forget_cache(id);
        }
        self.fleet.join(info);
        self.announce(id);
        self.queue.free_all();
    }

    pub(super) fn on_left(&mut self, worker: WorkerId) {
        if self.fleet.leave(worker) {
            self.clear_feed_timers(worker);
            self.forget_cache(worker);
            self.lose(worker);
            // Some that wait may wait in vain now.
            self.queue.free_all();
        }
    }

    pub(super) fn on_health(&mut self, report: HealthReport) {
        let worker = report.worker;
        let life = report.epoch.map(|epoch| self.meet(worker, epoch));
        let Some(record) = self.fleet.get_mut(worker).filter(|_| life != Some(Life::Past)) else {
            return;
        };
        match record.probed(report, self.config.limits.missed_probes) {
            Probe::Noted => {}
            Probe::Died => self.lose(worker),
            Probe::Revived => self.revive(worker, life == Some(Life::New)),
        }
        self.announce(worker);
    }

    pub(super) fn on_load(&mut self, report: LoadReport) {
        if let Some(worker) = self.fleet.get_mut(report.worker) {
            worker.load = Some((self.now, report));
        }
    }

    /// What a worker says of its room counts for a while, and whoever waits for it may go once it has some. Another life than the known one
    /// is met by a probe: until then the driver follows the events of the old one, and would ask in vain for those of the new.
    pub(super) fn on_room(&mut self, report: RoomReport) {
        let worker = report.worker;
        let account = self.ledger.account(worker);
        let known = |record: &&mut Worker| record.info.epoch == report.epoch;
        let Some(record) = self.fleet.get_mut(worker).filter(known) else {
            return;
        };
        record.room = Some(Room::told(self.now, &report, &account));
        if report.pause.is_zero() {
            self.queue.free(worker);
        }
    }

    /// What a worker says of its cache is of use where its events do not say it, and in the life that is known.
    pub(super) fn on_sketches(&mut self, report: SketchReport) {
        let known = |record: &&Worker| record.info.epoch == report.epoch;
        let Some(record) = self.fleet.get(report.worker).filter(known) else {
            return;
        };
        // Where the numbers have begun anew, nobody knows what a number says.
        if !record.tells_exactly() && !record.feed.is_doubted() {
            self.residency.sketches.take(self.now, record.feed.next(), report);
        }
    }

    pub(super) fn on_kv(&mut self, batch: KvBatch) {
        let (worker, limits) = (batch.worker, self.feed_limits());
        if self.meet(worker, batch.epoch) == Life::Past {
            return;
        }
        if let Some(record) = self.fleet.get_mut(worker) {
            let step = record.feed.offer(batch.sequence, batch.updates, limits);
            self.follow(worker, &step);
        }
    }

    /// Its KV events began anew. If it lives another life the probes meet it soon; until then nothing of them is believed.
    pub(super) fn on_kv_restarted(&mut self, worker: WorkerId, epoch: BootEpoch) {
        if self.meet(worker, epoch) == Life::Past {
            return;
        }
        let Some(record) = self.fleet.get_mut(worker) else {
            return;
        };
        if record.feed.doubt() {
            self.actions.push_back(Action::Identify { worker });
            self.timers
                .set(Timer::Restart(worker), self.now + self.config.clocks.restart_doubt);
            self.announce(worker);
        }
    }

    /// It lives the same life after all: what its cache holds is asked for from the start.
    pub(super) fn on_restart_overdue(&mut self, worker: WorkerId) {
        if let Some(record) = self.fleet.get_mut(worker).filter(|record| record.feed.is_doubted()) {
            let step = record.feed.rebuild();
            self.follow(worker, &step);
        }
    }

    fn clear_feed_timers(&mut self, worker: WorkerId) {
        self.timers.clear(Timer::Resync(worker));
        self.timers.clear(Timer::Restart(worker));
    }

    pub(super) fn on_resync_done(&mut self, worker: WorkerId, complete: bool) {
        let limits = self.feed_limits();
        if let Some(record) = self.fleet.get_mut(worker) {
            let step = record.feed.replayed(complete, limits);
            self.follow(worker, &step);
        }
    }

    pub(super) fn on_resync_overdue(&mut self, worker: WorkerId) {
        let limits = self.feed_limits();
        if let Some(record) = self.fleet.get_mut(worker) {
            let step = record.feed.overdue(limits);
            self.follow(worker, &step);
        }
    }

    /// Does what a worker's feed of KV events asks for.
    fn follow(&mut self, worker: WorkerId, step: &FeedStep) {
        if step.clear {
            self.residency.clear_index(worker);
        }
        let exact = self.fleet.get(worker).is_none_or(Worker::tells_exactly);
        let next = self.fleet.get(worker).map_or(0, |record| record.feed.next());
        for (number, updates) in (next.saturating_sub(step.apply.len() as u64)..).zip(&step.apply) {
            self.residency.apply(worker, updates);
            self.residency.sketches.applied(worker, number, updates);
        }
        match exact {
            true => self.residency.sketches.forget(worker),
            false => self.residency.sketches.waits_for(worker, next),
        }
        if let Some(from_sequence) = step.ask {
            self.actions.push_back(Action::Resync { worker, from_sequence });
            self.timers
                .set(Timer::Resync(worker), self.now + self.config.clocks.resync);
        } else if !self.fleet.get(worker).is_some_and(|record| record.feed.is_replaying()) {
            self.timers.clear(Timer::Resync(worker));
        }
        self.announce(worker);
    }

    /// Meets an epoch of a worker; a new one ends all that was known of its cache and all that runs there.
    fn meet(&mut self, worker: WorkerId, epoch: BootEpoch) -> Life {
        let Some(record) = self.fleet.get_mut(worker) else {
            return Life::Past;
        };
        let life = record.meet(epoch);
        if life == Life::New {
            self.clear_feed_timers(worker);
            self.forget_cache(worker);
            self.lose(worker);
            self.announce(worker);
            self.queue.free_all();
        }
        life
    }

    /// It is back from the dead: nothing is assumed about its cache, and where it tells, it is asked for all of it.
    fn revive(&mut self, worker: WorkerId, reborn: bool) {
        self.forget_cache(worker);
        let record = self.fleet.get_mut(worker).expect("a revived worker is in the fleet");
        if record.info.kv_events && !reborn {
            let step = record.feed.rebuild();
            self.follow(worker, &step);
        }
    }

    fn forget_cache(&mut self, worker: WorkerId) {
        self.residency.forget(worker);
        self.links.forget(worker);
        self.errands.forget_worker(worker);
        self.sessions.evacuate(worker);
    }

    /// All legs at this worker are lost.
    fn lose(&mut self, worker: WorkerId) {
        self.errands_lose(worker);
        self.sessions.evacuate(worker);
        let leg_at = |request: &crate::handoff::Request| {
            let plan = request.placed?.plan;
            // The last of its legs there tells how much is lost.
            let legs = [Leg::Decode, Leg::Prefill, Leg::Lend];
            let leg = legs.into_iter().find(|leg| plan.worker_of(*leg) == Some(worker))?;
            Some((request.id, leg))
        };
        for (request, leg) in self.requests.values().filter_map(leg_at).collect::<Vec<_>>() {
            self.signal(request, Signal::Lost(leg));
        }
    }
}
