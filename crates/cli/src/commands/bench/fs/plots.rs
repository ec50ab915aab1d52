//! The pictures of `rio bench fs`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use riopipe_lab::{
    fs_plot::{self, Bar, Curve, DrawError, Mark},
    units,
};

use super::report::{Measured, Point};

/// Why there are no pictures.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlotError {
    #[error("can't write {path}: {source}", path = path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Draw(#[from] DrawError),
}

/// Draws all pictures into a folder, which is created if it is missing: for each load, drive and
/// round trip one with speed and latency (`append_fsync-optane-100us.svg`), and for the appends one
/// with the stages of an `fsync` (`fsync-optane-100us.svg`).
pub(super) fn write(folder: &Path, measured: &Measured) -> Result<Vec<PathBuf>, PlotError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| PlotError::Write { path, source }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let caption = measured.caption();
    let mut files = Vec::new();
    let mut save = |name: String, picture: String| {
        let path = folder.join(name);
        fs::write(&path, picture).map_err(failed(&path))?;
        files.push(path);
        Ok::<_, PlotError>(())
    };
    for points in sets(&measured.points) {
        // A set has at least one point.
        let Some(first) = points.first() else { continue };
        let place = format!("{}-{}us.svg", first.profile, first.rtt_us);
        let at = format!("{}, {}", first.profile, units::time(first.rtt_us * 1e3));
        let title = format!("{}, {at}", first.workload);
        let picture = fs_plot::curves(&curves(&points), &title, &caption)?;
        save(format!("{}-{place}", first.workload), picture)?;
        if first.workload == "append_fsync" {
            let title = format!("fsync, {at}, threads: {}", first.threads);
            save(format!("fsync-{place}"), fs_plot::bars(&bars(first), &title, &caption)?)?;
        }
    }
    Ok(files)
}

/// The points of each load, drive and round trip, by the number of threads.
fn sets(points: &[Point]) -> Vec<Vec<&Point>> {
    let mut sets: Vec<Vec<&Point>> = Vec::new();
    for point in points {
        let is_same = |set: &&mut Vec<&Point>| {
            set.first().is_some_and(|first| {
                (first.workload, &first.profile) == (point.workload, &point.profile)
                    && first.rtt_us.total_cmp(&point.rtt_us).is_eq()
            })
        };
        match sets.iter_mut().find(is_same) {
            Some(set) => set.push(point),
            None => sets.push(vec![point]),
        }
    }
    sets.iter_mut().for_each(|set| set.sort_by_key(|point| point.threads));
    sets
}

fn curves(points: &[&Point]) -> Vec<Curve> {
    let Some(first) = points.first() else { return Vec::new() };
    let of = |mode: &&'static str| Curve {
        name: (*mode).to_owned(),
        marks: points
            .iter()
            .filter_map(|point| Some((point.threads, point.modes.get(mode)?)))
            .map(|(threads, figures)| Mark {
                threads,
                ops_per_s: figures.ops_per_s,
                mean_us: figures.mean_us,
                p99_us: figures.p99_us,
            })
            .collect(),
    };
    first.modes.keys().map(of).collect()
}

fn bars(point: &Point) -> Vec<Bar> {
    let modes = point.modes.iter();
    modes
        .filter_map(|(mode, figures)| {
            let stages = figures.fsync.as_ref()?.breakdown.iter();
            let stages = stages.map(|one| (one.stage.replace('_', " "), one.mean_us)).collect();
            Some(Bar { name: (*mode).to_owned(), stages })
        })
        .collect()
}
