//! What the router core is told. Events carry block hashes and lengths, never token ids or text, so that a recording is
//! small and leaks no prompt.

use homing_kv::{BlockHash, Prompt, Sketch, Tier};
use homing_units::{BootEpoch, Duration, RequestId, SessionId, WorkerId};
use serde::{Deserialize, Serialize};

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A worker is part of the fleet from now on. The same id again replaces what was known of it.
    WorkerJoined(WorkerInfo),
    /// A worker is no longer part of the fleet.
    WorkerLeft(WorkerId),
    /// A liveness probe was answered, or was not.
    Health(HealthReport),
    /// A worker's own figures of its load.
    Load(LoadReport),
    /// What a worker says of its room, where it can be asked (see [`RoomReport`]).
    Room(RoomReport),
    /// A batch of a worker's KV events.
    Kv(KvBatch),
    /// The replay that `Action::Resync` asked for has ended; its batches came before as [`Event::Kv`].
    ResyncDone {
        /// The worker.
        worker: WorkerId,
        /// Whether every missing batch was replayed.
        complete: bool,
    },
    /// A worker's KV events are numbered from the start again, though its epoch is the same as far as anybody knows: it may
    /// live another life. Its batches are not passed on any more until `Action::Resync` asks for them.
    KvRestarted {
        /// The worker.
        worker: WorkerId,
        /// The life that it is known to live.
        epoch: BootEpoch,
    },
    /// A client asks for a turn.
    Turn(Turn),
    /// A leg that answers no client has ended well. `Prefill`, `Lend`: its prompt's KV is ready and held for the leg that
    /// pulls it. `Fetch`: the history is there.
    PrefillDone {
        /// Which leg.
        leg: LegId,
        /// Prompt tokens that its worker found in its cache, where it says so.
        cached_tokens: Option<u32>,
    },
    /// The decode leg has sent its first token.
    FirstToken {
        /// Which leg.
        leg: LegId,
    },
    /// The decode leg has ended well.
    Finished {
        /// Which leg.
        leg: LegId,
        /// What the engine reported.
        usage: LegUsage,
    },
    /// A leg has failed.
    LegFailed(LegFailure),
    /// The client has gone: both legs are to be cancelled, and nothing may stay booked.
    ClientGone(RequestId),
    /// Time has passed (see `poll_timeout`).
    Timeout,
    /// What a worker says is resident, where it can be asked and its KV events do not say it (see [`SketchReport`]).
    Sketches(SketchReport),
}

/// Which leg of which attempt at which request an answer belongs to. Answers of attempts that were given up are late
/// and change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LegId {
    /// The request.
    pub request: RequestId,
    /// Counts from 0 for each request: every new plan is a new attempt.
    pub attempt: u32,
    /// Which of the attempt's legs.
    pub leg: Leg,
}

/// The legs of a plan, in the order in which they are sent. `append` and `local` have the decode leg only; the first two come
/// before a heavy tail is prefilled elsewhere (see [`Fetch`](crate::action::Fetch)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// Holds the KV of the prompt's history, which is there already, for the fetch leg.
    Lend,
    /// Pulls the history to the prefill worker; of an [`Errand`](crate::action::Errand), brings its KV to its destination.
    Fetch,
    /// Computes the prompt's KV and holds it for the decode leg.
    Prefill,
    /// Streams the answer to the client.
    Decode,
}

impl Leg {
    /// The leg of the same attempt whose KV this one pulls.
    #[must_use]
    pub const fn source(self) -> Option<Self> {
        match self {
            Self::Lend | Self::Prefill => None,
            Self::Fetch => Some(Self::Lend),
            Self::Decode => Some(Self::Prefill),
        }
    }

    /// The leg of the same attempt that pulls the KV of this one.
    #[must_use]
    pub const fn puller(self) -> Option<Self> {
        match self {
            Self::Lend => Some(Self::Fetch),
            Self::Prefill => Some(Self::Decode),
            Self::Fetch | Self::Decode => None,
        }
    }

    /// Its name in logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lend => "lend",
            Self::Fetch => "fetch",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl LegId {
    /// Another leg of the same attempt.
    #[must_use]
    pub const fn sibling(self, leg: Leg) -> Self {
        Self { leg, ..self }
    }
}

/// What a worker may do, as limits: data-parallel is "all do both", static disaggregation is "one or the other".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill only.
    Prefill,
    /// Decode and the prefill of tails.
    Decode,
    /// Anything.
    Both,
}

impl Role {
    /// Whether it may run prefill legs.
    #[must_use]
    pub const fn prefills(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    /// Whether it may run decode legs.
    #[must_use]
    pub const fn decodes(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }
}

/// What is known of a worker when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Its id.
    pub id: WorkerId,
    /// Its name in logs, headers and metrics, such as `d0`.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// Its present life.
    pub epoch: BootEpoch,
    /// Size of its KV pool in tokens.
    pub kv_tokens: u64,
    /// The longest prompt and output it takes, in tokens.
    pub max_context_tokens: u32,
    /// Whether it can give and take KV.
    pub transfers: bool,
    /// Whether it sends KV events; without them residency is predicted.
    pub kv_events: bool,
    /// What it can do beyond its role.
    #[serde(default)]
    pub abilities: Abilities,
}

/// What engines differ in beyond their roles. The default is all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abilities {
    /// Whether it can decode a turn whose prompt it prefilled itself. Where not, each turn that it decodes needs a prefill leg.
    pub prefills_alone: bool,
    /// Whether a worker that decodes can hand over the KV that it holds.
    pub hands_over: bool,
    /// Whether it keeps a turn's KV for the next one.
    pub caches: bool,
}

impl Default for Abilities {
    fn default() -> Self {
        Self {
            prefills_alone: true,
            hands_over: true,
            caches: true,
        }
    }
}

/// The answer to a liveness probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthReport {
    /// The worker that was probed.
    pub worker: WorkerId,
    /// Its life, where it answered and says so.
    pub epoch: Option<BootEpoch>,
    /// Whether it answered.
    pub alive: bool,
}

/// A worker's own figures of its load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The worker.
    pub worker: WorkerId,
    /// Requests in its batch.
    pub running: u32,
    /// Requests that wait for a place.
    pub waiting: u32,
    /// Tokens of its pool that are in use by requests.
    pub kv_tokens_used: u64,
    /// Requests that wait for KV from another worker; 0 where it does not say.
    pub transfer_queue: u32,
    /// Requests that lost their blocks and wait to run again; 0 where it does not say.
    pub retracted: u32,
}

/// What a worker says of the room in its pool, from a snapshot that costs its scheduler nothing: what the router's ledger
/// cannot know, because others send there, too, and outputs get longer than was reckoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomReport {
    /// The worker.
    pub worker: WorkerId,
    /// Its life.
    pub epoch: BootEpoch,
    /// Tokens of its pool that are free, or for the taking, once all that it has accepted has its place.
    pub spare_tokens: u64,
    /// How long new work is to stay away; zero while what it has accepted has room.
    pub pause: Duration,
}

/// What a worker says is resident of the sessions that it served, at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SketchReport {
    /// The worker.
    pub worker: WorkerId,
    /// Its life.
    pub epoch: BootEpoch,
    /// The number of the batch of KV events that comes next: what those before it said is in the sketches.
    pub sequence: u64,
    /// How long ago that was.
    pub age: Duration,
    /// One for each session that is remembered there and has no request there, the one that was served last first.
    pub sketches: Vec<SessionSketch>,
}

/// What is resident of one session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSketch {
    /// Which; `None` where another router served it, or this one in an earlier life.
    pub session: Option<SessionId>,
    /// Resident blocks of its last prompt, from the first on.
    pub tip_blocks: u32,
    /// The last of these, as [`BlockHash::wire`] has it; 0 where there is none.
    pub tip: u64,
    /// All resident blocks of its last prompt and answer.
    pub sketch: Sketch,
}

/// A batch of a worker's KV events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvBatch {
    /// The worker.
    pub worker: WorkerId,
    /// Its life.
    pub epoch: BootEpoch,
    /// Counts from 0 in each life, without gaps.
    pub sequence: u64,
    /// What changed, in order.
    pub updates: Vec<KvUpdate>,
}

/// A change of a worker's cache, in the router's own hashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvUpdate {
    /// These blocks are cached there now, each the parent of the next.
    Stored {
        /// The block before the first, if any.
        parent: Option<BlockHash>,
        /// Their hashes.
        hashes: Vec<BlockHash>,
        /// Where they lie.
        tier: Tier,
    },
    /// These blocks are no longer cached there.
    Removed {
        /// Their hashes.
        hashes: Vec<BlockHash>,
        /// Where they lay.
        tier: Tier,
    },
    /// Nothing is cached there any more.
    Cleared,
}

/// A client's request: one turn of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// The driver's id, used once; below [`Errand::FIRST_ID`](crate::action::Errand::FIRST_ID).
    pub request: RequestId,
    /// What the client says about the session.
    pub session: SessionHint,
    /// The prompt.
    pub prompt: Prompt,
    /// Tokens to generate at most.
    pub max_output_tokens: u32,
    /// When it is its turn among those that wait: lower is earlier, as engines take it.
    #[serde(default)]
    pub priority: i32,
    /// How the prompt's tokens compare with those of earlier prompts; `None` where the driver does not know.
    #[serde(default)]
    pub compared: Option<Compared>,
    /// Of which kind the client is; recordings of before there were kinds say nothing.
    #[serde(default)]
    pub kind: ClientKind,
}

/// A kind of client: turns of one kind come back, go on and end alike, as far as the driver can tell. The numbers are the driver's, and
/// names stay with it; 0, and what is beyond the few kinds that the core tells apart, is any client of which nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClientKind(pub u8);

/// A fact that blocks cannot tell, since the last tokens of a prompt fill no block: which earlier prompt a prompt
/// continues to the token. Two questions after the same long instructions differ in just these tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compared {
    /// The prompt itself: equal prompts have equal ids as long as the driver remembers them.
    pub prompt: PromptId,
    /// The longest shorter prompt that this one begins with, of those that the driver remembers.
    pub continues: Option<PromptId>,
}

/// The driver's id of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PromptId(pub u64);

/// What the client says about the session of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum SessionHint {
    /// The client names it; the key is a hash of the name (names stay in the driver).
    Explicit(u128),
    /// Nothing: recognise it by its prompt.
    Recognise,
}

/// What an engine reported at the end of a leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegUsage {
    /// Prompt tokens found in the cache (pulled ones not counted), where the engine says so.
    pub cached_tokens: Option<u32>,
    /// Tokens generated.
    pub output_tokens: u32,
}

/// A leg has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegFailure {
    /// Which leg.
    pub leg: LegId,
    /// How.
    pub cause: FailureCause,
    /// From where a new attempt would go on.
    pub resume: Resume,
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    /// No connection could be made, or it broke: says something about the worker's life.
    Unreachable,
    /// The worker is there but takes no more (429, 503): says nothing about its life.
    Busy,
    /// The KV did not arrive: says something about the link between two workers, nothing about their lives.
    Transfer,
    /// The worker answered with an error of its own (500).
    Engine,
    /// The worker refused the request itself (400, 404, 413, 422); another worker would too.
    Invalid,
}

/// From where a new attempt at a request goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Resume {
    /// Nothing was sent to the client yet.
    Start,
    /// Some of the answer was sent: go on from the prompt with the sent tokens after it.
    After {
        /// Prompt and sent tokens.
        prompt: Prompt,
        /// Tokens that are still wanted at most.
        max_output_tokens: u32,
    },
    /// Some of the answer was sent, and going on would not be exact: the client must be told.
    Impossible,
}
