//! Where a command's words and files go: stdout for data, stderr for notes, and files and folders that appear when they
//! are whole.
//!
//! What is written to a file or a folder lies beside its place under a name of its own until it is complete, and then
//! takes its place by a rename. When the command fails, and when it is interrupted, that goes away again: nobody finds
//! half a result and takes it for a whole one. A reader that has enough of stdout (`| head`) is no failure.

use crate::failure::{ReaderGone, Usage};
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::signal::unix::{SignalKind, signal};

/// Writes data to stdout.
///
/// # Errors
/// [`ReaderGone`] if nobody reads it any more; else why it cannot be written.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        Err(error) => Err(error).context("stdout cannot be written"),
    }
}

/// Says a line on stderr. Where that takes nothing, nobody is left to tell.
pub fn say(line: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// What would be left behind if the process ended now.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what is unfinished when the process is interrupted or asked to end, and ends it as the signal would have.
///
/// # Errors
/// If signals cannot be watched.
pub fn clean_up_when_interrupted() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("signals cannot be watched")?;
    // The handlers are in place when this returns, so that no signal falls between.
    let entered = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt()).context("no handler for Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("no handler for SIGTERM")?;
    drop(entered);
    std::thread::spawn(move || {
        let kind = runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => SignalKind::interrupt(),
                _ = terminate.recv() => SignalKind::terminate(),
            }
        });
        // Kept locked to the end: what is just being finished is finished before, or never.
        let unfinished = unfinished();
        for path in unfinished.iter() {
            remove(path);
        }
        say("error: interrupted, nothing was written");
        std::process::exit(128 + kind.as_raw_value());
    });
    Ok(())
}

fn remove(path: &Path) {
    // That it cannot be removed changes nothing in what is reported.
    let _ = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
}

/// A file or a folder that is not whole yet; removed when dropped before it is kept.
#[derive(Debug)]
struct Partial(PathBuf);

impl Partial {
    /// Takes a name of its own in `folder` for what shall be called `name`, and makes it by `make`.
    fn create<T>(folder: &Path, name: &OsString, make: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<(Self, T)> {
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".partial-{}", std::process::id()));
        let path = folder.join(hidden);
        let mut unfinished = unfinished();
        let made = make(&path)?;
        unfinished.insert(path.clone());
        Ok((Self(path), made))
    }

    /// Gives it its name.
    fn keep(self, place: &Path) -> io::Result<()> {
        let mut unfinished = unfinished();
        fs::rename(&self.0, place)?;
        unfinished.remove(&self.0);
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if unfinished().remove(&self.0) {
            remove(&self.0);
        }
    }
}

/// A file that appears when it is whole. What is there already and is no regular file (a device, a pipe) is written to
/// as it is.
#[derive(Debug)]
pub struct OutFile {
    /// Its name, as it was given.
    named: PathBuf,
    file: File,
    /// Where it is until then and where it goes.
    partial: Option<(Partial, PathBuf)>,
}

impl OutFile {
    /// Opens it; `what` names it in errors, such as `--html`.
    ///
    /// # Errors
    /// [`Usage`] where no file can be there.
    pub fn create(what: &str, out: &Path) -> Result<Self> {
        let wrong = |problem: &str| Usage::error(format_args!("{what} `{}`: {problem}", out.display()));
        let failed = |error: io::Error| wrong(&error.to_string());
        // A link stays: what it leads to is replaced.
        let place = fs::canonicalize(out).unwrap_or_else(|_| out.to_owned());
        match fs::metadata(&place) {
            Ok(found) if found.is_dir() => return Err(wrong("is a folder, expected a path to a file")),
            Ok(found) if !found.is_file() => {
                let file = OpenOptions::new().write(true).open(&place).map_err(failed)?;
                return Ok(Self {
                    named: out.to_owned(),
                    file,
                    partial: None,
                });
            }
            _ => {}
        }
        let name = place
            .file_name()
            .filter(|_| !ends_in_slash(out))
            .ok_or_else(|| wrong("no file name, expected a path to a file"))?;
        let folder = folder_of(&place);
        if !folder.is_dir() {
            return Err(wrong("its folder does not exist, expected one that does"));
        }
        let (partial, file) = Partial::create(folder, &name.to_owned(), |path| File::create(path)).map_err(failed)?;
        Ok(Self {
            named: out.to_owned(),
            file,
            partial: Some((partial, place)),
        })
    }

    /// Has it written by `write`; then it appears.
    ///
    /// # Errors
    /// If it cannot be written, or cannot take its place.
    pub fn write(self, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
        let Self {
            named,
            mut file,
            partial,
        } = self;
        let written = write(&mut file).and_then(|()| match partial {
            Some((partial, place)) => partial.keep(&place),
            None => Ok(()),
        });
        match written {
            // A pipe, whose reader has read what it wanted.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
            written => written.with_context(|| format!("`{}` cannot be written", named.display())),
        }
    }
}

/// A folder of files that appear when all are whole, with the folders above it.
#[derive(Debug)]
pub struct OutFolder {
    partial: Partial,
    place: PathBuf,
    /// It exists already, empty: the files move into it.
    exists: bool,
}

impl OutFolder {
    /// Makes it within the folder where that exists, else in the nearest one above it; `what` names it in errors, such
    /// as `--out`.
    ///
    /// # Errors
    /// [`Usage`] where something is there already, or no folder can be.
    pub fn create(what: &str, out: &Path) -> Result<Self> {
        let wrong = |problem: &str| Usage::error(format_args!("{what} `{}`: {problem}", out.display()));
        let exists = match fs::read_dir(out).map(|mut entries| entries.next().is_none()) {
            Ok(true) => true,
            Ok(false) => return Err(wrong("is not empty, expected a new folder")),
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                return Err(wrong("is or lies in a file, expected a new folder"));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(wrong(&error.to_string())),
        };
        if !exists && leads_nowhere(out) {
            return Err(wrong("is or lies in a link that leads nowhere, expected a new folder"));
        }
        let name = match out.file_name() {
            Some(name) => name.to_owned(),
            None if exists => OsString::from("run"),
            None => return Err(wrong("no name, expected a path to a new folder")),
        };
        let within = if exists { out } else { nearest_folder(out) };
        let (partial, ()) =
            Partial::create(within, &name, |path| fs::create_dir(path)).map_err(|error| wrong(&error.to_string()))?;
        Ok(Self {
            partial,
            place: out.to_owned(),
            exists,
        })
    }

    /// Writes a file in it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let file = self.partial.0.join(name);
        fs::create_dir_all(folder_of(&file))
            .and_then(|()| fs::write(&file, bytes))
            .with_context(|| format!("`{}` cannot be written", self.place.join(name).display()))
    }

    /// The files are whole: they appear.
    ///
    /// # Errors
    /// If they cannot take their place.
    pub fn keep(self) -> Result<()> {
        let place = self.place.clone();
        let kept = if self.exists {
            self.move_files()
        } else {
            fs::create_dir_all(folder_of(&place)).and_then(|()| self.partial.keep(&place))
        };
        kept.with_context(|| format!("`{}` cannot be written", place.display()))
    }

    /// Moves the files into the folder that exists; what held them goes away.
    fn move_files(self) -> io::Result<()> {
        for entry in fs::read_dir(&self.partial.0)? {
            let entry = entry?;
            fs::rename(entry.path(), self.place.join(entry.file_name()))?;
        }
        Ok(())
    }
}

fn ends_in_slash(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

/// The folder that a file lies in.
pub fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Whether the path or one above it is a link to nothing.
fn leads_nowhere(path: &Path) -> bool {
    path.ancestors().any(|path| path.is_symlink() && !path.exists())
}

/// The nearest folder above a path that exists.
fn nearest_folder(path: &Path) -> &Path {
    let mut folder = folder_of(path);
    while !folder.exists() {
        folder = folder_of(folder);
    }
    folder
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("it is there").flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_when_it_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("a");
        let create = || OutFile::create("output", &place).expect("it can be there");
        let text = || fs::read_to_string(&place).expect("it is there");
        let out = create();
        assert!(!place.exists());
        out.write(|file| file.write_all(b"one")).expect("its place is free");
        assert_eq!(text(), "one");
        drop(create());
        let failed = create().write(|file| file.write_all(b"two").and(Err(io::Error::other("full"))));
        assert_eq!(
            format!("{:#}", failed.expect_err("it fails")),
            format!("`{}` cannot be written: full", place.display())
        );
        assert_eq!(text(), "one");
        create()
            .write(|file| file.write_all(b"three"))
            .expect("a file is replaced");
        assert_eq!(text(), "three");
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn a_link_stays_and_a_device_is_not_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::write(&target, "old").expect("it fits");
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        let out = OutFile::create("output", &link).expect("it can be there");
        out.write(|file| file.write_all(b"new")).expect("it takes its place");
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&target).expect("it is there"), "new");
        let out = OutFile::create("output", Path::new("/dev/null")).expect("a device");
        assert!(out.partial.is_none());
    }

    #[test]
    fn a_folder_appears_with_those_above_it_or_not_at_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("some/where/run");
        let out = OutFolder::create("--out", &place).expect("it can be there");
        out.write("file", b"x").expect("it fits");
        assert_eq!(names(folder.path()).len(), 1);
        drop(out);
        assert!(names(folder.path()).is_empty());
        let out = OutFolder::create("--out", &place).expect("it can be there");
        out.write("file", b"x").expect("it fits");
        out.keep().expect("its place is free");
        assert_eq!(
            (names(&place), names(folder.path())),
            (vec!["file".to_owned()], vec!["some".to_owned()])
        );
        let empty = tempfile::tempdir().expect("a folder");
        let out = OutFolder::create("--out", empty.path()).expect("it is empty");
        out.write("file", b"x").expect("it fits");
        out.keep().expect("it takes files");
        assert_eq!(names(empty.path()), ["file"]);
    }

    #[test]
    fn where_nothing_can_be_is_said() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, full) = (folder.path().join("file"), folder.path().join("full"));
        fs::write(&file, "x").expect("it fits");
        fs::create_dir(&full).expect("a folder");
        fs::write(full.join("file"), "x").expect("it fits");
        let check = |made: Result<()>, expected: &str| {
            let error = made.expect_err("nothing can be there").to_string();
            assert!(error.contains(expected), "`{error}` lacks `{expected}`");
        };
        let file_at = |path: PathBuf| OutFile::create("output", &path).map(drop);
        check(file_at(full.clone()), "is a folder");
        check(file_at(folder.path().join("none/file")), "its folder does not exist");
        check(file_at(folder.path().join("none/")), "no file name");
        check(file_at(PathBuf::new()), "no file name");
        check(file_at(file.join("below")), "its folder does not exist");
        let folder_at = |path: PathBuf| OutFolder::create("--out", &path).map(drop);
        check(folder_at(full.clone()), "is not empty");
        check(folder_at(file.clone()), "is or lies in a file");
        check(folder_at(file.join("below/that")), "is or lies in a file");
        check(folder_at(PathBuf::new()), "no name");
        check(folder_at(PathBuf::from("/")), "is not empty");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nothing", &link).expect("a link");
        check(folder_at(link.clone()), "leads nowhere");
        check(folder_at(link.join("below")), "leads nowhere");
        assert_eq!(names(folder.path()), ["file", "full", "link"]);
    }
}
