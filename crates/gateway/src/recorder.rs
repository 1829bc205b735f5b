//! The recording of the core's events, written beside the core and never in its way.
//!
//! The core's task hands pieces to a thread that writes them. A disk that falls behind the bound ends the recording, which
//! stays readable up to there: a router must not stand still for its own record.

use homing_router::RouterConfig;
use homing_router::action::Action;
use homing_router::event::Event;
use homing_router::recording;
use homing_units::Instant;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Pieces that wait to be written.
const PIECES: usize = 4_096;
/// Bytes that are gathered before they are handed over, unless the core is idle.
const PIECE_BYTES: usize = 64 << 10;

/// A recording under way.
pub(crate) struct Recorder {
    codec: recording::Recorder,
    gathered: Vec<u8>,
    /// `None` once the recording has ended early.
    pieces: Option<SyncSender<Vec<u8>>>,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Recorder {
    /// Begins a recording of a router with this configuration.
    ///
    /// # Errors
    /// The file cannot be created, or the thread not started.
    pub(crate) fn create(path: &Path, config: &RouterConfig) -> std::io::Result<Self> {
        let file = File::create(path)?;
        let (sender, pieces) = sync_channel(PIECES);
        let thread = std::thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(move || write(file, &pieces))?;
        Ok(Self {
            codec: recording::Recorder::new(config),
            gathered: Vec::new(),
            pieces: Some(sender),
            thread,
        })
    }

    /// The core is about to be told this.
    pub(crate) fn event(&mut self, at: Instant, event: &Event) {
        if self.pieces.is_some() {
            self.codec.event(at, event);
            self.gathered.append(&mut self.codec.take_bytes());
            if self.gathered.len() >= PIECE_BYTES {
                self.hand_over();
            }
        }
    }

    /// The core has asked for this.
    pub(crate) fn action(&mut self, action: &Action) {
        if self.pieces.is_some() {
            self.codec.action(action);
        }
    }

    /// Hands over what is gathered.
    pub(crate) fn hand_over(&mut self) {
        if self.gathered.is_empty() {
            return;
        }
        let piece = std::mem::take(&mut self.gathered);
        if self
            .pieces
            .as_ref()
            .is_some_and(|pieces| pieces.try_send(piece).is_err())
        {
            tracing::error!("the recording has ended early: its file cannot be written, or not fast enough");
            self.pieces = None;
        }
    }

    /// Ends the recording and waits until it is written.
    pub(crate) async fn finish(mut self) {
        if self.pieces.is_some() {
            self.codec.finish();
            self.gathered.append(&mut self.codec.take_bytes());
            self.hand_over();
        }
        drop(self.pieces);
        let thread = self.thread;
        match tokio::task::spawn_blocking(move || thread.join()).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::error!(%error, "the recording could not be written to its end"),
            Ok(Err(_)) | Err(_) => tracing::error!("the recording's thread broke"),
        }
    }
}

fn write(mut file: File, pieces: &Receiver<Vec<u8>>) -> std::io::Result<()> {
    for piece in pieces {
        file.write_all(&piece)?;
    }
    file.sync_all()
}
