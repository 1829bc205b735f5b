//! How the legs of a turn meet: SGLang's bootstrap server and the KV transfer behind it, without the bytes.
//!
//! A prefill server opens a *sender* for a room, a decode server a *receiver* at the prefill server that its request names.
//! The prefill server computes nothing before the receiver is there (`PrefillBootstrapQueue.pop_bootstrapped`), and the
//! decode server emits nothing before the KV has come (`DecodeTransferQueue.pop_transferred`). What travels is the
//! content: the tokens that the KV was really computed from, so that a decode server continues *them*, whatever its own
//! request says. A room is a place at one prefill server and one of its data-parallel ranks; a receiver that was sent
//! elsewhere waits in vain, as it does there.

use super::{Log, Waits};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The prefill servers that decode servers can reach, by `host:port` of their bootstrap servers.
#[derive(Default)]
pub struct Fabric {
    servers: Mutex<BTreeMap<String, Arc<Bootstrap>>>,
}

impl Fabric {
    pub fn register(&self, address: &str, server: Arc<Bootstrap>) {
        self.servers.lock().unwrap().insert(address.to_owned(), server);
    }

    pub fn find(&self, address: &str) -> Option<Arc<Bootstrap>> {
        let server = self.servers.lock().unwrap().get(address).cloned()?;
        (!server.dead.is_cancelled()).then_some(server)
    }
}

/// The bootstrap server of one life of a prefill server.
pub struct Bootstrap {
    pub page_size: u32,
    pub dp_size: u32,
    pub dead: CancellationToken,
    /// Told of each change.
    log: Arc<Log>,
    rooms: Mutex<BTreeMap<(u32, u64), Arc<Room>>>,
}

/// What a prefill server sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kv {
    /// The tokens that the KV was computed from.
    pub content: Vec<u32>,
    /// The token that the prefill server sampled; the decode server's answer begins with it.
    pub first: u32,
    /// Tokens of the prompt that were in the prefill server's cache.
    pub cached: usize,
}

#[derive(Default)]
struct State {
    has_sender: bool,
    has_receiver: bool,
    /// What came of it; an error is the reason that the other side is told, if it is told one.
    outcome: Option<Result<Kv, Option<String>>>,
}

/// Where two legs meet.
pub struct Room {
    state: watch::Sender<State>,
}

/// A side of a room is open already.
pub struct Taken;

impl Bootstrap {
    pub fn new(page_size: u32, dp_size: u32, log: Arc<Log>) -> Self {
        Self {
            page_size,
            dp_size,
            log,
            dead: CancellationToken::new(),
            rooms: Mutex::default(),
        }
    }

    /// Opens a prefill server's side. A second sender is what `--disaggregation-decode-allocation-policy
    /// prefill_complete` refuses by name and the default policy mixes up silently; here it is always refused.
    pub fn open_sender(&self, rank: u32, room: u64) -> Result<Arc<Room>, Taken> {
        self.open(rank, room, |state| &mut state.has_sender)
    }

    /// Opens a decode server's side.
    pub fn open_receiver(&self, rank: u32, room: u64) -> Result<Arc<Room>, Taken> {
        self.open(rank, room, |state| &mut state.has_receiver)
    }

    fn open(&self, rank: u32, room: u64, side: fn(&mut State) -> &mut bool) -> Result<Arc<Room>, Taken> {
        let mut rooms = self.rooms.lock().unwrap();
        let found = rooms.entry((rank, room)).or_insert_with(|| {
            Arc::new(Room {
                state: watch::Sender::new(State::default()),
            })
        });
        let mut was_open = false;
        found
            .state
            .send_modify(|state| was_open = std::mem::replace(side(state), true));
        self.log.changed.notify_waiters();
        if was_open { Err(Taken) } else { Ok(Arc::clone(found)) }
    }

    /// Forgets a room when a side is through with it.
    pub fn close(&self, rank: u32, room: u64) {
        self.rooms.lock().unwrap().remove(&(rank, room));
        self.log.changed.notify_waiters();
    }

    /// Rooms in which a decode server waits.
    pub fn receivers(&self) -> usize {
        let rooms = self.rooms.lock().unwrap();
        rooms.values().filter(|room| room.state.borrow().has_receiver).count()
    }

    /// Rooms in which somebody waits.
    pub fn open_rooms(&self) -> usize {
        self.rooms.lock().unwrap().len()
    }
}

/// Why a side stopped waiting.
#[derive(Debug, PartialEq, Eq)]
pub enum Failed {
    /// The peer never came in time.
    TimedOut,
    /// The peer says that it failed, perhaps with a reason.
    Told(Option<String>),
    /// The peer's server is gone.
    PeerDied,
}

impl Room {
    /// A prefill server waits for the decode server.
    pub async fn receiver(&self, waits: &Waits) -> Result<(), Failed> {
        let mut state = self.state.subscribe();
        let arrived = state.wait_for(|state| state.has_receiver || state.outcome.is_some());
        let Ok(state) = tokio::time::timeout(waits.bootstrap, arrived).await else {
            return Err(Failed::TimedOut);
        };
        match &state.expect("this room holds the sending half").outcome {
            Some(Err(reason)) => Err(Failed::Told(reason.clone())),
            _ => Ok(()),
        }
    }

    /// A decode server waits for the KV. A dead peer is noticed by heartbeats only.
    pub async fn kv(&self, peer: &Bootstrap, waits: &Waits) -> Result<Kv, Failed> {
        let mut state = self.state.subscribe();
        let died = async {
            peer.dead.cancelled().await;
            tokio::time::sleep(waits.heartbeat).await;
        };
        tokio::select! {
            state = state.wait_for(|state| state.outcome.is_some()) => {
                let outcome = state.expect("this room holds the sending half").outcome.clone();
                outcome.expect("waited for").map_err(Failed::Told)
            }
            () = died => Err(Failed::PeerDied),
            () = tokio::time::sleep(waits.waiting) => Err(Failed::TimedOut),
        }
    }

    /// Waits until the other side has given up.
    pub async fn given_up(&self) {
        let mut state = self.state.subscribe();
        drop(state.wait_for(|state| matches!(state.outcome, Some(Err(_)))).await);
    }

    /// Ends the meeting; whoever waits is told. What was said first holds.
    pub fn conclude(&self, outcome: Result<Kv, Option<String>>) {
        self.state.send_modify(|state| {
            state.outcome.get_or_insert(outcome);
        });
    }
}
