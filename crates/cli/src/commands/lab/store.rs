//! The folder of the results. A point is stored as soon as it is measured.

use std::{
    fs,
    path::{Path, PathBuf},
};

use riopipe_lab::{
    figures::{
        catalogue,
        figure::{Figure, SCHEMA},
    },
    report::Point,
};
use serde::{Deserialize, Serialize};

use crate::failure::{Code, Failure};

/// The points of a figure that is not complete yet.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Partial {
    /// The program that measured them: others may differ in speed.
    pub(super) version: String,
    /// Whether they are of a quick run.
    pub(super) quick: bool,
    /// Time of a command and its answer, without the drive, ns.
    pub(super) trip_ns: Option<f64>,
    /// In the order of the axis.
    pub(super) points: Vec<Point>,
}

/// The folder.
pub(super) struct Store(PathBuf);

impl Store {
    /// The folder at `path`, made if it is missing.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(path).map_err(|error| cannot("make the folder", path, &error))?;
        Ok(Self(path.to_owned()))
    }

    /// The figure, if it is complete and was measured in the same way.
    pub(super) fn complete(&self, id: &str, quick: bool) -> Option<Figure> {
        self.figure(id).filter(|figure| figure.quick == quick)
    }

    /// All complete figures, in the order of the catalogue.
    pub(super) fn figures(&self) -> Vec<Figure> {
        catalogue::all().filter_map(|entry| self.figure(entry.id)).collect()
    }

    fn figure(&self, id: &str) -> Option<Figure> {
        let text = fs::read(self.0.join(format!("{id}.json"))).ok()?;
        // A file of another program, or one that was cut, is measured again.
        let figure: Figure = serde_json::from_slice(&text).ok()?;
        (figure.schema == SCHEMA && figure.id == id).then_some(figure)
    }

    /// The points that an interrupted run has left.
    pub(super) fn partial(&self, id: &str) -> Option<Partial> {
        serde_json::from_slice(&fs::read(self.partial_path(id)).ok()?).ok()
    }

    pub(super) fn write_partial(&self, id: &str, partial: &Partial) -> Result<(), Failure> {
        let path = self.partial_path(id);
        write(&path, &json(partial)?)
    }

    pub(super) fn write_complete(&self, figure: &Figure) -> Result<(), Failure> {
        self.write(&format!("{}.json", figure.id), &json(figure)?)?;
        let path = self.partial_path(&figure.id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(cannot("remove", &path, &error))
            }
            _ => Ok(()),
        }
    }

    /// Writes a file of the folder; returns its path.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, Failure> {
        let path = self.0.join(name);
        write(&path, bytes)?;
        Ok(path)
    }

    fn partial_path(&self, id: &str) -> PathBuf {
        self.0.join(format!("{id}.part.json"))
    }
}

/// Writes a file whole or not at all: an interruption leaves the old one.
fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let beside = path.with_extension("new");
    fs::write(&beside, bytes)
        .and_then(|()| fs::rename(&beside, path))
        .map_err(|error| cannot("write", path, &error))
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec_pretty(value)
        .map_err(|error| Failure::new(Code::Failed, "can't write JSON").because(&error))
}

fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Code::Failed, format!("can't {what} {}", path.display())).because(error)
}
