//! The board that a policy sees for one turn: the fleet, the ledger, residency and sessions, brought together.

use super::Router;
use crate::action::WorkerState;
use crate::admission::{Account, Denied};
use crate::event::Role;
use crate::fleet::Worker;
use crate::handoff::Request;
use crate::policies::{Admission, Board, LinkView, TurnView, WorkerView};
use crate::residency::Held;
use homing_kv::{BlockHash, Prompt};
use homing_units::{RequestId, WorkerId};
use std::collections::BTreeMap;

/// Tokens of a prompt's beginning by which some systems tell prompts apart.
const PREFIX_TOKENS: u32 = 256;

impl Router {
    /// The board and the turn of a request that waits.
    pub(super) fn survey(&self, id: RequestId) -> (Board, TurnView) {
        let request = &self.requests[&id];
        let turns = self.sessions.get(request.session).map_or(0, |session| session.turns);
        self.survey_of(request, turns)
    }

    /// The same of a request whose session has begun so many turns, itself among them; of one that nobody has asked for yet, too.
    pub(super) fn survey_of(&self, request: &Request, turns: u32) -> (Board, TurnView) {
        let session = self
            .sessions
            .get(request.session)
            .expect("a session with a turn in flight, or one that was looked up, is remembered");
        let kin = self.sessions.kin(session.id);
        let clients = self.sessions.clients();
        let (return_share, expected_gap_s) = clients.returns_of_all();
        let turn = TurnView {
            request: request.id,
            session: session.id,
            turn_index: request.turn_index,
            prompt_tokens: request.prompt.tokens,
            max_output_tokens: request.max_output_tokens,
            expected_output_tokens: self.output_tokens(request.kind, request.max_output_tokens),
            expected_turns: clients.hazards(request.kind).turns(),
            expected_gap_s,
            return_share,
            block_size: self.config.block_size,
            shared_tokens: session.shared_tokens(),
            history_tokens: session.history_blocks.saturating_mul(self.config.block_size),
            prefix: prefix(&request.prompt, self.config.block_size),
            new_family: turns == 1 && kin.len() == 1 && !request.streamed,
            was_resident: session.was_resident,
            home: session.home,
            carried: session.carried,
            waited: self.now.saturating_since(request.queued_since),
            // Where nobody can do without, giving up transfers would be giving up.
            may_transfer: request.transfer_failures < self.config.limits.transfer_retries
                || !self.fleet.iter().any(Worker::serves_alone),
            may_fetch: self.config.fetch && request.transfer_failures == 0,
        };
        let held = self
            .residency
            .held(self.now, &request.prompt.blocks, session.family, kin);
        // A worker that is asked before each turn tells what it holds; guesses are for those that are not.
        let probes = self.habits.probes;
        let told = probes.then(|| self.residency.known(&request.prompt.blocks, session.family));
        let kept = self.kept_from(request);
        let view = |worker: &Worker| {
            let told = told.as_ref().filter(|_| worker.state() == WorkerState::Exact);
            let held = told.unwrap_or(&held).get(&worker.info.id).copied().unwrap_or_default();
            let mut view = self.view(worker, request, held, turn.new_family);
            if kept.is_some_and(|plan| plan.decode == worker.info.id || plan.prefill == Some(worker.info.id)) {
                view.keep();
            }
            view
        };
        (
            Board {
                workers: self.fleet.iter().map(view).collect(),
                links: self.link_views(),
            },
            turn,
        )
    }

    /// Prompt tokens that a worker would be expected to hold without what its sketches say, where they say anything.
    pub(super) fn untold_tokens(&self, id: RequestId, worker: WorkerId) -> Option<u32> {
        self.residency.sketches.told(self.now, worker)?;
        let request = &self.requests[&id];
        let session = self.sessions.get(request.session)?;
        let (prompt, kin) = (&request.prompt, self.sessions.kin(session.id));
        let held = self
            .residency
            .held_untold(self.now, &prompt.blocks, session.family, kin);
        let held = held.get(&worker).copied().unwrap_or_default();
        let blocks = held.gpu_blocks + held.host_blocks;
        Some(blocks.saturating_mul(self.config.block_size).min(prompt.tokens))
    }

    fn view(&self, worker: &Worker, request: &Request, held: Held, new_family: bool) -> WorkerView {
        let info = &worker.info;
        let tokens = |blocks: u32| blocks.saturating_mul(self.config.block_size).min(request.prompt.tokens);
        let (resident_tokens, held_tokens) = (tokens(held.gpu_blocks), tokens(held.gpu_blocks + held.host_blocks));
        let exclusive = (held.exclusive_blocks * f64::from(self.config.block_size)) as u32;
        let homed = self.sessions.homed(info.id);
        let others = self.sessions.homed_without(info.id, request.session);
        let indexed = self.residency.index.worker_blocks(info.id);
        let load = worker.load.map(|(_, load)| load);
        let lacks = request.prompt.tokens - held_tokens;
        let account = self.ledger.account(info.id);
        let [denies_alone, denies_seed, denies_prefill] = self.denials(worker, &account, request, lacks);
        WorkerView {
            id: info.id,
            role: info.role,
            transfers: info.transfers,
            kv_tokens: info.kv_tokens,
            account,
            running: load.map_or(0, |load| load.running),
            waiting: load.map_or(0, |load| load.waiting),
            transfer_queue: load.map_or(0, |load| load.transfer_queue),
            retracted: load.map_or(0, |load| load.retracted),
            kv_tokens_used: load.map_or(0, |load| load.kv_tokens_used),
            assigned_requests: worker.assigned_requests,
            recent_ttft_s: worker.recent_ttft_s,
            homed_sessions: homed.sessions,
            live_tokens: homed.live_tokens,
            live_own_tokens: others.busy_own_tokens + others.expected_own_tokens,
            live_sessions: others.live_sessions,
            cached_tokens: u64::from(indexed.gpu) * u64::from(self.config.block_size),
            spills: indexed.host > 0,
            prefilling_s: self.now.saturating_since(worker.prefilling_since).as_secs_f64(),
            speed: self.fleet.speed(worker),
            resident_tokens,
            host_tokens: held_tokens - resident_tokens,
            exclusive_tokens: if new_family { 0 } else { exclusive.min(held_tokens) },
            denies_alone,
            denies_seed,
            denies_prefill,
            denies_lend: self.denies_lend(worker, &account, request),
            denies_export: self.denies_export(worker, &account, request, lacks),
        }
    }

    /// Why a worker cannot lend what it holds of this prompt: nothing is computed for that, so that its role does not matter.
    fn denies_lend(&self, worker: &Worker, account: &Account, request: &Request) -> Option<Denied> {
        self.denies_all(worker, account, request)
            .or_else(|| (!worker.info.transfers || !worker.info.abilities.hands_over).then_some(Denied::Unable))
    }

    /// Why a worker cannot take the turn alone, with KV from elsewhere, and for another. `lacks` is what it would prefill.
    fn denials(&self, worker: &Worker, account: &Account, request: &Request, lacks: u32) -> [Option<Denied>; 3] {
        let (role, limits) = (worker.info.role, &self.config.limits);
        if let Some(denied) = self.denies_all(worker, account, request) {
            return [Some(denied); 3];
        }
        let unable = |able: bool| (!able).then_some(Denied::Unable);
        let alone = unable(worker.info.abilities.prefills_alone);
        if self.habits.admission == Admission::AtOnce {
            let transfers = unable(worker.info.transfers);
            let decodes = unable(role.decodes());
            return [
                alone.or(decodes),
                decodes.or(transfers),
                unable(role.prefills()).or(transfers),
            ];
        }
        let decode = || unable(role.decodes()).or_else(|| self.denies_decode(worker, account, request));
        let append = || {
            (role == Role::Decode)
                .then(|| account.denies_append(lacks, limits))
                .flatten()
        };
        let seed = || unable(worker.info.transfers).or_else(|| account.denies_seed(request.prompt.tokens, limits));
        let prefill = unable(role.prefills() && worker.info.transfers);
        let decode = decode();
        [
            alone.or(decode).or_else(append),
            decode.filter(|denied| denied.is_lasting()).or_else(seed).or(decode),
            prefill.or_else(|| account.denies_prefill(lacks, limits)),
        ]
    }

    /// Why a worker takes no leg of this request.
    pub(super) fn denies_all(&self, worker: &Worker, account: &Account, request: &Request) -> Option<Denied> {
        let trial = || worker.is_on_trial() && account.requests >= self.config.limits.trial_requests;
        let needed = self.needed_tokens(request.kind, request.prompt.tokens, request.max_output_tokens);
        let checks: [(bool, Denied); 5] = [
            (worker.state() == WorkerState::Dead, Denied::Dead),
            (request.avoid.contains(&worker.info.id), Denied::Avoided),
            (needed > u64::from(worker.context_limit()), Denied::TooLong),
            (!worker.is_alive(), Denied::Suspect),
            (self.now < worker.busy_until, Denied::Busy),
        ];
        let denied = checks.into_iter().find_map(|(denies, why)| denies.then_some(why));
        denied.or_else(|| trial().then_some(Denied::OnTrial))
    }

    /// Why a worker has no room to decode this request, whatever its KV comes from.
    fn denies_decode(&self, worker: &Worker, account: &Account, request: &Request) -> Option<Denied> {
        let (id, kv_tokens, limits) = (worker.info.id, worker.info.kv_tokens, &self.config.limits);
        let output_tokens = self.output_tokens(request.kind, request.max_output_tokens);
        let whole = u64::from(request.prompt.tokens) + u64::from(output_tokens);
        // What runs there may share much of the prompt; that is looked at only where it matters.
        let shared = || {
            self.ledger
                .reserve_tokens(id, &request.prompt, output_tokens, self.config.block_size)
        };
        let denied = account.denies_decode(whole, kv_tokens, limits);
        let denied = denied.and_then(|_| account.denies_decode(shared(), kv_tokens, limits));
        let room = worker.room.as_ref();
        denied.or_else(|| room?.denies(self.now, account, whole, shared))
    }

    fn link_views(&self) -> BTreeMap<(WorkerId, WorkerId), LinkView> {
        let mut links: BTreeMap<_, LinkView> = BTreeMap::new();
        for (link, transfers) in self.ledger.links() {
            links.entry(link).or_default().transfers = transfers;
        }
        for (link, failures) in self.links.all_failed(self.now, self.config.clocks.link_memory) {
            let view = links.entry(link).or_default();
            (view.failures, view.on_trial) = (failures, true);
        }
        links
    }
}

/// The hash of a prompt's first block, and of the last block within its first tokens.
fn prefix(prompt: &Prompt, block_size: u32) -> Option<(BlockHash, BlockHash)> {
    let first = *prompt.blocks.first()?;
    let within = (PREFIX_TOKENS / block_size).max(1) as usize;
    let last = prompt.blocks[..within.min(prompt.blocks.len())].last()?;
    Some((first, *last))
}
